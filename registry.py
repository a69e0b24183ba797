"""`python -m registry`, the name of earlier versions for `certizoo registry`."""

import runpy
import sys

if __name__ == "__main__":
    sys.stderr.write("python -m registry is now: certizoo registry\n")
    runpy.run_module("certizoo.registry", run_name="__main__", alter_sys=True)
