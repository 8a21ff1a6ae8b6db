"""Join the job that the launcher describes, then run a module as it is: a script of others that starts no job itself.

python -m tests.multiprocess.joined MODULE [ARGUMENT ...]
"""

import runpy
import sys

import lockstep

if __name__ == "__main__":
    lockstep.start()
    module, *arguments = sys.argv[1:]
    sys.argv = [module, *arguments]
    lockstep.run_main(lambda: runpy.run_module(module, run_name="__main__", alter_sys=True))
