"""What runs inside a cell: `python -m toto_compat.cell <request.json> <result.json>`."""
