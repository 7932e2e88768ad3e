"""Cells as Slurm jobs: what the submitting machine and a node tell each other lies in a folder that both see."""
