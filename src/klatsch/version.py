"""The version of klatsch, at the bottom so that every room can write it down."""

VERSION = "0.2.0.dev0"
