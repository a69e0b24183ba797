"""`python -m trainers.doctor +model=NAME data=NAME ...`: what this machine can do, and whether the run fits on it."""

import sys

from certizoo.imports import large_imports

with large_imports():
    from trainers.doctor.findings import main

raise SystemExit(main(sys.argv[1:]))
