"""What a node makes of its neighbours' messages, and how far news travels: without any process."""

import pytest
import torch

from klatsch import encodings
from klatsch import topology as tp
from klatsch.ranks.mailbox import Heard
from klatsch.ranks.membership import lag
from klatsch.ranks.message import Part, as_it_is


@pytest.mark.parametrize("mixed, wanted", [(False, 0.25 * 1 + 0.5 * 4), (True, 1 + 0.25 * 1 + 0.5 * 4)])
def test_every_neighbour_pulls_with_its_own_weight(mixed, wanted):
    voices = {1: [as_it_is(torch.tensor([2.0]))], 2: [as_it_is(torch.tensor([5.0]))]}
    heard = Heard(voices, {1: 0.25, 2: 0.5}, None, None, torch.float32)
    assert heard.pull(torch.tensor([1.0]), 0, None, mixed).item() == wanted


def test_codes_are_sound_if_their_scales_are():
    codes = torch.ones(300, dtype=torch.int8)
    for scale, sound in ((0.5, True), (torch.inf, False), (torch.nan, False)):
        scales = torch.tensor([0.5, scale]).bfloat16()
        assert Part([scales, codes], 300, encodings.of("int8")).is_sound == sound


def test_news_of_a_late_graph_takes_longer():
    assert lag(tp.channel(tp.ring(6), every=2)) == 3 * 2
    assert lag(tp.channel(tp.ring(6), every=2, late=1)) == 3 * (2 + 1)
