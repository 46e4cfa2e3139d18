"""The reference pages: recipe keys from their types, commands from their functions, Python names from the source."""
