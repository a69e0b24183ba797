"""`python -m shards`, the name of earlier versions for `certizoo shards`."""

import runpy
import sys

if __name__ == "__main__":
    sys.stderr.write("python -m shards is now: certizoo shards\n")
    runpy.run_module("certizoo.shards", run_name="__main__", alter_sys=True)
