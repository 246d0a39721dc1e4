"""klatsch inside frameworks that would wrap the model in DDP: what docs/frameworks.md needs beside a line or two."""
