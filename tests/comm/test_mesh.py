"""Who shares a group with whom, and what is said when the sizes do not fit the world."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_commfree.comm.job import DATA, REPLICA, Mesh, replica_mesh

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(
    lambda sizes: Mesh(tuple(f"axis{i}" for i in range(len(sizes))), tuple(sizes))
)


def test_two_replicas_of_four_ranks_by_hand() -> None:
    mesh = replica_mesh(world_size=8, replica_size=4)
    assert mesh == Mesh((REPLICA, DATA), (2, 4))
    assert mesh.groups(REPLICA) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh.groups(DATA) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [mesh.coordinate(6, axis) for axis in (REPLICA, DATA)] == [1, 2]


def test_the_middle_of_three_axes_by_hand() -> None:
    mesh = Mesh(("replica", "data", "tensor"), (2, 3, 2))
    assert mesh.groups("data") == [[0, 2, 4], [1, 3, 5], [6, 8, 10], [7, 9, 11]]
    assert [mesh.coordinate(9, axis) for axis in mesh.axes] == [1, 1, 1]


@given(MESHES)
def test_the_groups_of_an_axis_partition_the_ranks(mesh: Mesh) -> None:
    world = range(math.prod(mesh.sizes))
    for axis, size in zip(mesh.axes, mesh.sizes, strict=True):
        groups = mesh.groups(axis)
        assert sorted(rank for group in groups for rank in group) == list(world)
        for group in groups:
            assert group == sorted(group)
            assert [mesh.coordinate(rank, axis) for rank in group] == list(range(size))
            for other in set(mesh.axes) - {axis}:
                assert len({mesh.coordinate(rank, other) for rank in group}) == 1, (
                    f"a group of {axis} differs on {other} too"
                )


@pytest.mark.parametrize("replica_size", [4, 12, 0, -2])
def test_a_replica_size_that_does_not_divide_is_refused(replica_size: int) -> None:
    expected = (
        rf"ranks in this job \(6\) is not divisible by `replica_size={replica_size}`\."
        r".*Choose one of \[1, 2, 3, 6\]"
    )
    with pytest.raises(ValueError, match=expected):
        replica_mesh(world_size=6, replica_size=replica_size)
