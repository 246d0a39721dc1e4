"""Whether a file is the picture that its name promises."""

from xml.etree import ElementTree

import numpy as np
from PIL import Image


def check_picture(path, most=0.5):
    content = path.read_bytes()
    if path.suffix == ".svg":
        assert ElementTree.fromstring(content).tag.endswith("svg")
    elif path.suffix == ".png":
        pixels = np.asarray(Image.open(path).convert("L"))
        assert min(pixels.shape) > 300
        assert 0.02 < (pixels < 250).mean() < most  # neither empty nor full
    else:
        assert content.startswith(b"%PDF")
