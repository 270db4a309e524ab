"""How a program begins and ends: what is set before torch is loaded, and errors that a user sees as one line.

    if __name__ == "__main__":          the first lines of a program, above its imports
        from command.process import begin
        begin()
    ...
    if __name__ == "__main__":          the last line
        run_command(main)

Importing this module changes nothing.
"""

import importlib.util
import os
import signal
import sys
from pathlib import Path


class UserError(ValueError):
    """Bad input of the user's. The message is one line that says what is wrong; no traceback is shown with it."""


def begin():
    """Prepare this process: call it before torch is imported. Exits with one line where the program cannot work."""
    # Check the platform first, so that the user sees one clear error instead of the first import that fails.
    if sys.platform != "linux":
        sys.exit("error: this needs Linux, for Triton and to confine the candidates' processes (on Windows: WSL)")
    missing = [name for name in ("torch", "triton", "transformers") if not importlib.util.find_spec(name)]
    if missing:
        sys.exit(f"error: {', '.join(missing)}: not installed (pip install -r requirements.txt)")
    # OpenMP's threads spin while they wait for work, by default so long that two processes on the same cores slow each
    # other down several times. With this number they spin for a fraction of a millisecond and then sleep, so a small
    # model's next operator still starts quickly. libgomp reads the variable when torch is loaded.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")


def report(error) -> int:
    """Print an error of the user's as one line. Returns the status of a program that ends with it, as of argparse."""
    print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    return 2


def run_command(main):
    """Run a command line's main() and exit with the status that it returns.

    A UserError, or a file that cannot be read or written, becomes one line on stderr and status 2, as argparse reports
    a bad option. Ctrl-C and SIGTERM close all that is open, and become one line and status 130, which
    ends with the text of a KeyboardInterrupt that main() raises.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt as interrupt:  # its text, if it has one, says how to go on
        print(f"{Path(sys.argv[0]).name}: {': '.join(['interrupted', *interrupt.args])}", file=sys.stderr)
        sys.exit(130)
    except (UserError, OSError) as error:
        sys.exit(report(error))
