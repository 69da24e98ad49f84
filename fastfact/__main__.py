"""`python -m fastfact`, also under torchrun."""

from fastfact.cli.main import main

main()
