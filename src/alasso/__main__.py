"""The command ``alasso``, and ``python -m alasso``."""

import sys


def main() -> None:
    """Run the laboratory's command line, or say what to install where it is missing."""
    try:
        from alasso.bench.cli.main import main as run
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("alasso", "torch"):
            raise
        print(f"alasso: the command line needs {error.name}: pip install 'alasso[bench]'", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:  # while modules are loaded; afterwards the command line listens
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
