"""The console script, and `python -m llmtrain`."""

import signal


def main() -> None:
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # While modules are loaded Ctrl-C ends it as it ends other programs; cli/main.py then has a word for it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from llmtrain.cli.main import main

    main()


if __name__ == "__main__":
    main()
