"""The first hour on a GPU: everything that was only predicted without one, tried once and written down."""
