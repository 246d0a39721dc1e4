"""The paper and beyond: its figures, tables and sentences, from what a store holds."""
