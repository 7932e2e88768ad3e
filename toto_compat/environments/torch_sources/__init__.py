"""Facts of every torch release, read from the wheels' own sources: variables, defaults, places of log statements."""
