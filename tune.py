"""`python tune.py`, `ray submit cluster/ray.yaml tune.py`: the search of tuning/__main__.py."""

import os
import sys

if "CERTIZOO_HOME" in os.environ:  # `ray submit` copies this file to the home folder and runs it there
    os.chdir(os.environ["CERTIZOO_HOME"])
    sys.path.insert(0, os.getcwd())

from tuning.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
