"""How fast `tokenize-corpus` is: see tokenize_speed.py, whose options it takes.

Python puts this folder before the standard library for every script in it, so that whoever imports the library's
`tokenize` (inspect does) gets here: it is given that one.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    from tokenize_speed import main

    main()
else:
    del sys.modules[__name__]
    here = Path(__file__).resolve().parent
    path, sys.path = sys.path, [one for one in sys.path if Path(one or ".").resolve() != here]
    try:
        import tokenize  # noqa: F401
    finally:
        sys.path = path
