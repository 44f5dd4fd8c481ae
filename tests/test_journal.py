import errno
import json
import os
import threading

from streamclr.records.journal import Journal


def test_a_full_disk_costs_lines_of_the_journal_not_the_run(tmp_path, monkeypatch, capsys):
    real, full = os.write, [False]

    def write(fd, content):
        if full[0] and "journal.jsonl" in os.readlink(f"/proc/self/fd/{fd}"):
            real(fd, bytes(content)[:10])  # a part of it still fits
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, content)

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    journal = Journal(tmp_path / "journal.jsonl")
    for number in range(1, 6):
        full[0] = number in (2, 3)
        journal.write({"number": number})
    size = journal.sync()
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert [json.loads(line)["number"] for line in lines] == [1, 4, 5]
    assert size == (tmp_path / "journal.jsonl").stat().st_size
    assert capsys.readouterr().err.count("cannot be written") == 1


def test_several_lines_are_written_together_or_not_at_all(tmp_path, monkeypatch, capsys):
    journal, real, n_left = Journal(tmp_path / "predictions.jsonl", "predictions.jsonl"), os.write, [1]

    def write(fd, content):
        n_left[0] -= 1
        return real(fd, content if n_left[0] >= 0 else bytes(content)[:15])  # the disk takes a line and a half

    monkeypatch.setattr("streamclr.records.journal.os.write", write)
    assert journal.write({"image": 0}, {"image": 1})
    assert not journal.write({"image": 2}, {"image": 3})
    n_left[0] = 1
    assert journal.write({"image": 4})
    journal.close()
    lines = (tmp_path / "predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["image"] for line in lines] == [0, 1, 4]
    assert "predictions.jsonl cannot be written (the disk is full): going on" in capsys.readouterr().err


def test_one_thread_writes_while_another_syncs(tmp_path):
    journal = Journal(tmp_path / "journal.jsonl")
    writer = threading.Thread(target=lambda: [journal.write({"number": n}) for n in range(2000)])
    writer.start()
    sizes = []
    while writer.is_alive():
        sizes.append(journal.sync())
    content = (tmp_path / "journal.jsonl").read_bytes()
    assert all(content[:size].endswith(b"\n") for size in sizes if size)
    assert [json.loads(line)["number"] for line in content.splitlines()] == list(range(2000))
