"""The committed reference: made release by release, thinned, and shown in README, its picture and the page."""
