"""Bindings that are wrong in one way each, as a user's file could be, by what is wrong with them."""
