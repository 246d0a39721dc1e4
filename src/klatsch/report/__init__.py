"""The paper and beyond: its figures, tables and sentences, from the results in a store."""
