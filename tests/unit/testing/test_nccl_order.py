"""The simulated device: order of launches, slots, contents, what a stall says."""

import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from testing.nccl_order.communicator import Communicator
from testing.nccl_order.compute import ComputeStream
from testing.nccl_order.group import unversioned
from testing.nccl_order.items import Item, OrderError
from testing.nccl_order.launch import Device, Options


def started(device: Device, item: Item) -> threading.Thread:
    thread = threading.Thread(target=device.begin, args=(item,), daemon=True)
    thread.start()
    return thread


def launched(device: Device, count: int) -> list[Item]:
    items = [Item(f"communicator {i}", f"operation {i}", ()) for i in range(count)]
    for item in items:
        device.launch(item)
    return items


@pytest.mark.parametrize("is_full", [False, True])
def test_operations_start_in_the_order_of_their_launch_where_there_is_room(is_full: bool):
    device = Device(Options(resident=1) if is_full else Options())
    first, second = launched(device, 2)
    if is_full:
        device.begin(first)
    later = started(device, second)
    later.join(0.2)
    assert not second.started, "the second was launched later"
    _ = device.end(first, None) if is_full else device.begin(first)
    later.join(5.0)
    assert second.started


def test_without_one_queue_any_order_starts():
    device = Device(Options(one_queue=False))
    _, second = launched(device, 2)
    device.begin(second)
    assert second.started


def test_a_tensor_that_changes_between_post_and_run_is_an_error():
    device, tensor = Device(Options()), torch.arange(5.0)
    item = Item("communicator", "send to rank 1", (tensor[1:],))
    device.launch(item)
    item.check_unchanged()
    tensor[0] = 7.0  # not a part of what is sent
    item.check_unchanged()
    tensor[4] = 7.0
    with pytest.raises(OrderError, match="send to rank 1 was written to between"):
        item.check_unchanged()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.uint8, torch.bool])
def test_contents_are_compared_without_making_the_storage_rigid(dtype: torch.dtype):
    tensor = torch.zeros(6, dtype=dtype)
    item = Item("communicator", "broadcast", (tensor,))
    Device(Options()).launch(item)
    tensor.untyped_storage().resize_(0)


def test_after_a_failure_nothing_starts():
    device = Device(Options())
    first, second = launched(device, 2)
    device.begin(first)
    device.end(first, RuntimeError("the peer is gone"))
    with pytest.raises(OrderError, match="after an earlier failure"):
        device.begin(second)
    with pytest.raises(OrderError, match="the peer is gone"):
        device.await_end(first)


def test_a_stall_ends_in_bounded_time_and_says_what_is_open(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    device = Device(Options(stall_s=0.3))
    first, second = launched(device, 2)
    device.begin(first)
    begin = time.monotonic()
    with pytest.raises(OrderError) as caught:
        device.await_end(second)
    assert time.monotonic() - begin < 5.0
    assert "rank 0 waits for communicator 1: operation 1" in str(caught.value)
    assert "operation 0 (on the device" in str(caught.value) and "operation 1 (queued)" in str(caught.value)


@pytest.mark.parametrize(("field", "value"), [("stall_s", 0.0), ("resident", 0)])
def test_options_that_make_no_sense_are_refused(field: str, value: float):
    with pytest.raises(ValueError, match=f"{field} = {value}"):
        Options(**{field: value})


def test_abort_tells_all_that_wait_at_once():
    device = Device(Options(stall_s=30.0))
    first, second = launched(device, 2)
    device.begin(first)
    found: list[str] = []

    def wait(item: Item) -> None:
        try:
            device.await_end(item)
        except OrderError as error:
            found.append(str(error))

    threads = [threading.Thread(target=wait, args=(item,), daemon=True) for item in (first, second)]
    for thread in threads:
        thread.start()
    begin = time.monotonic()
    device.abort("group 7 was aborted")
    for thread in threads:
        thread.join(5.0)
    assert found == ["group 7 was aborted"] * 2
    assert time.monotonic() - begin < 5.0
    with pytest.raises(OrderError, match="cannot start any more: group 7 was aborted"):
        device.launch(Item("communicator", "operation", ()))


def test_the_watchdog_finds_what_nobody_waits_for(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("WORLD_SIZE", "1")
    device = Device(Options(stall_s=0.3))
    (item,) = launched(device, 1)
    device.begin(item)
    assert item.done.wait(10.0), "nobody waits for it, and it does not end"
    with pytest.raises(OrderError, match=r"operation 0 \(on the device"):
        device.await_end(item)
    assert "watchdog: no progress" in capsys.readouterr().err


def test_the_watchdog_leaves_what_ends_in_time():
    device = Device(Options(stall_s=1.0))
    for item in (item for _ in range(3) for item in launched(device, 1)):
        device.begin(item)
        time.sleep(0.6)
        device.end(item, None)
    assert device.failure is None


def sent(device: Device, tensor: torch.Tensor, fills: bool = False, communicator: str = "pair") -> Item:
    item = Item(communicator, "send to rank 1", (tensor,))
    if fills:
        item = Item(communicator, "recv from rank 1", (), (tensor,))
    device.launch(item)
    return item


def test_a_wait_orders_the_stream_and_does_not_block_the_host():
    device, tensor = Device(Options(stall_s=30.0)), torch.zeros(4)
    item = sent(device, tensor, fills=True)
    device.order_after(item)  # would never come back if it waited for the end
    assert not item.done.is_set()
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.append(device.touch(tensor, False, "sum") is None), daemon=True)
    reader.start()
    reader.join(0.2)
    assert not found, "the compute stream stands still where it touches what arrives"
    device.touch(torch.zeros(4), True, "fill_")
    device.end(item, None)
    reader.join(5.0)
    assert found == [True]


def test_what_is_posted_after_a_wait_starts_after_what_was_waited_for():
    device = Device(Options(one_queue=False))
    (first,) = launched(device, 1)
    device.begin(first)
    device.order_after(first)
    (second,) = launched(device, 1)
    later = started(device, second)
    later.join(0.2)
    assert not second.started
    device.end(first, None)
    later.join(5.0)
    assert second.started


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize(
    ("fills", "writes", "wrong"), [(True, False, True), (False, True, True), (False, False, False)]
)
def test_a_tensor_in_use_is_touched_after_a_wait_only(ended: bool, fills: bool, writes: bool, wrong: bool):
    """Whether the operation has ended by chance makes no difference."""
    device, whole = Device(Options()), torch.zeros(8)
    item = sent(device, whole[:4], fills)
    if ended:
        device.begin(item)
        device.end(item, None)
    device.touch(whole[4:], writes, "another part")
    if wrong:
        with pytest.raises(OrderError, match=r"mul_ is not ordered after (recv|send)"):
            device.touch(whole[3:], writes, "mul_")
    else:
        device.touch(whole[3:], writes, "mul_")


def test_what_arrives_is_passed_on_after_a_wait_or_on_the_same_communicator():
    device, tensor = Device(Options()), torch.zeros(4)
    item = sent(device, tensor, fills=True)
    sent(device, tensor, communicator="pair")
    with pytest.raises(OrderError, match="is not ordered after recv"):
        sent(device, tensor, communicator="another")
    device.order_after(item)
    sent(device, tensor, communicator="another")


def test_operators_of_the_host_are_watched():
    device, tensor = Device(Options(host_waits=False)), torch.zeros(4)
    item = sent(device, tensor)
    with ComputeStream(device):
        assert tensor.sum() == 0 and tensor.view(2, 2).shape == (2, 2)
        with pytest.raises(OrderError, match=r"aten.add_.* is not ordered after send"):
            tensor.view(2, 2)[0].add_(1)
        device.begin(item)
        device.end(item, None)
        device.order_after(item)
        tensor.add_(1)
        assert not device.uses, "nothing is kept of what is done"


def test_results_do_not_become_a_part_of_the_model():
    """gloo copies a reduce-scatter's result in the queue's thread, perhaps after the model has used the tensor."""
    communicator = Communicator("alone", Device(Options()), dist.HashStore(), [0], 0, timedelta(seconds=20))
    result = torch.nn.Parameter(torch.ones(2)) * 1
    before = result.grad_fn

    class Copies:
        def wait(self, _timeout: timedelta) -> None:
            result.copy_(torch.zeros(2))

    item = communicator.collective("reduce_scatter", 2, (), (result,), lambda _data: Copies())
    assert item.done.wait(20) and item.error is None
    communicator.close()
    assert result.tolist() == [0, 0] and result.grad_fn is before


def test_a_late_result_is_no_change_in_place():
    """Megatron splits what it has gathered; NCCL fills it afterwards, and autograd does not see that."""
    whole = torch.nn.Parameter(torch.ones(4)) * 1
    parts = whole.split(2)
    (late,) = unversioned([whole])
    with torch.no_grad():
        late.copy_(torch.zeros(4))
    assert torch.cat(parts).tolist() == [0, 0, 0, 0]
    with torch.no_grad():
        whole.copy_(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified inplace"):
        torch.cat(parts)


def test_the_host_waits_at_the_first_launch_of_types_and_shapes(monkeypatch: pytest.MonkeyPatch):
    device, waits = Device(Options()), list[str]()
    monkeypatch.setattr(device, "host_wait", waits.append)
    small, large = torch.ones(2), torch.ones(4)
    with ComputeStream(device):
        for tensor in (small, small, large, small.view(1, 2)[0], large):
            tensor.mul_(3.0)
        torch.empty(8)
    assert [wait.partition(" with ")[0] for wait in waits] == [
        "first launch of aten.mul_.Tensor",
        "first launch of aten.mul_.Tensor",
        "first launch of aten.empty.memory_format",
    ]


def test_a_host_wait_under_a_transfer_that_cannot_end_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("WORLD_SIZE", "1")
    device = Device(Options(stall_s=0.3))
    launched(device, 1)
    with pytest.raises(
        OrderError, match=r"rank 0 waits for first launch of mm, where the host waits(.|\n)*operation 0"
    ):
        device.host_wait("first launch of mm")


def test_a_host_wait_orders_nothing():
    """What arrived by then has arrived by luck: the wait for the operation is still missing."""
    device, tensor = Device(Options()), torch.zeros(4)
    item = sent(device, tensor, fills=True)
    device.begin(item)
    device.end(item, None)
    device.host_wait("first launch of mm")
    with pytest.raises(OrderError, match="is not ordered after"):
        device.touch(tensor, False, "sum")


def test_without_host_waits_the_device_is_not_waited_for():
    device = Device(Options(stall_s=30.0, host_waits=False))
    launched(device, 1)
    device.host_wait("first launch of mm")


def test_a_read_of_a_value_waits_for_the_compute_stream():
    device = Device(Options(stall_s=0.3))
    first, _ = launched(device, 2)
    device.wait_for_compute()  # is ordered after nothing
    device.order_after(first)
    with pytest.raises(OrderError, match="wait for each other"):
        device.wait_for_compute()
