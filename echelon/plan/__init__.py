"""The nouns: frozen documents that every stage consumes. Standard library only."""
