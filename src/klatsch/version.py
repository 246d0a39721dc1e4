"""The version of klatsch, for all rooms."""

VERSION = "0.2.0"
