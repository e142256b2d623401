import pytest
import torch

from pipeline.errors import StoreError
from pipeline.evaluation.activations import Activations


@pytest.mark.parametrize("limit", [0, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_come_back_as_they_were_put(tmp_path, limit, dtype):  # type: ignore[no-untyped-def]
    rows = [3, 1, 7]
    held = Activations(rows, 5, folder=tmp_path, limit=limit)
    states = [torch.randn(count, 5, generator=torch.Generator().manual_seed(count)).to(dtype) for count in rows]
    for turn in range(2):
        for step in (1, 0, 2):
            held.put(step, states[step] + turn)
    for step in (2, 0, 1):
        assert torch.equal(held.get(step), states[step] + 1)
    assert held.on_disk == (limit == 0)
    assert list(tmp_path.iterdir()) == []  # the file has no name
    held.close()


def test_a_folder_that_takes_no_file_is_named(tmp_path):  # type: ignore[no-untyped-def]
    held = Activations([1], 5, folder=tmp_path / "absent", limit=0)
    with pytest.raises(StoreError, match=r"absent: No such file.*hidden states of 1 tokens"):
        held.put(0, torch.zeros(1, 5))
