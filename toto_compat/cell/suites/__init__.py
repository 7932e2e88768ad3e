"""The suites. Each row of contract/suites.py names a function in here."""
