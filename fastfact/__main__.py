"""`python -m fastfact`, also under torchrun."""

from fastfact.cli import main

main()
