"""`python -m proxy` is the command `tierline`."""

from proxy.cli import main

if __name__ == "__main__":
    main(prog_name="tierline")
