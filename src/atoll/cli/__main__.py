"""For `python -m atoll.cli` and `torchrun -m atoll.cli`."""

from atoll.cli import run

if __name__ == "__main__":
    run()
