"""Tables of attention whose number of tiles stays, for documents that change."""

import pytest
import torch

from braid.kernels.attention.spans import document_runs
from braid.kernels.attention.tiles import StaticTiles, tile_count, tiles_of

CPU = torch.device("cpu")


def runs_of(*lengths):
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return document_runs(ids[None])[0]


@pytest.mark.parametrize("window", [None, 100])
def test_other_documents_have_their_own_tables_and_repeat_a_tile(window):
    static = StaticTiles(1000, 13, window, CPU)
    addresses = [static.joined.data_ptr(), static.tiles.queries_P2.data_ptr()]
    for lengths in ((1000,), (300, 257, 1, 442), (10,) * 100, (257, 1, 257, 1, 257, 1, 226)):
        runs_N = runs_of(*lengths)
        static.load(runs_N)
        own = tiles_of(runs_N, window, CPU)
        assert torch.equal(static.tiles.first_N, own.first_N)
        assert torch.equal(static.tiles.last_N, own.last_N)
        for made, wanted in (
            (static.tiles.queries_P2, own.queries_P2),
            (static.tiles.keys_P2, own.keys_P2),
        ):
            count = tile_count(runs_N)
            assert len(wanted) == count
            assert torch.equal(made[:count], wanted)
            assert (made[count:] == wanted[-1]).all(), "the one with least work"
        assert addresses == [static.joined.data_ptr(), static.tiles.queries_P2.data_ptr()]


def test_more_tiles_than_there_is_room_for_are_an_error():
    with pytest.raises(ValueError, match="the documents have 8 tiles, and the tables are for 7"):
        StaticTiles(1000, 7, None, CPU).load(runs_of(1000))
