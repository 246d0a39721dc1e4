"""The language problem: text, a stack of small GPTs, and the problem itself."""
