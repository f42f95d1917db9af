"""What goes wrong between a hub and a disk: each fault leads to the right bytes, or to one error and no file."""

from __future__ import annotations

import json
import resource
import shutil
from pathlib import Path

import pytest
from hub_server import SHARD_BYTES, TOKEN, Fault, Hub, tensor_file
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onedesk.service.errors import FileError, ModelError, OnedeskError, PeerError
from pulling import Desk, make_desk

SHARD = "model-00001-of-00002.safetensors"
OTHER_SHARD = "model-00002-of-00002.safetensors"
CHOSEN = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    SHARD,
    OTHER_SHARD,
    "README.md",
    "LICENSE",
}


@pytest.fixture(params=["hf", "modelscope"])
def either(request: pytest.FixtureRequest, tmp_path: Path, hub: Hub) -> Desk:
    """A tree that asks the one hub's side of the stand-in, or the other's."""
    return make_desk(tmp_path / "either", hub, request.param)


def leftovers(desk: Desk) -> list[str]:
    return sorted(path.name for path in (desk.models / "model").glob("*.part*"))


def test_a_plain_pull_has_every_chosen_file_and_no_other(either: Desk):
    done = either.pull()
    assert {file["path"] for file in done["files"]} == CHOSEN
    assert either.same_files()
    assert done["event"] == "done"
    assert done["fetched"] == done["bytes"]
    manifest = json.loads((either.models / "model" / "onedesk.json").read_text())
    assert {file["path"]: file["sha256"] for file in manifest["files"]} == {
        file["path"]: file["sha256"] for file in done["files"]
    }
    assert leftovers(either) == []


def test_a_second_pull_fetches_nothing(either: Desk):
    either.pull()
    either.hub.asked.clear()
    assert either.pull()["fetched"] == 0
    assert [asked for asked in either.hub.asked if asked.place == "storage"] == []


@pytest.mark.parametrize("kind", ["chunked", "gzip", "ignore_range"])
def test_an_unusual_answer_with_the_right_bytes_is_accepted(either: Desk, kind: str):
    either.hub.fault(SHARD, Fault(kind))
    either.pull()
    assert either.same_files()
    assert either.hub.count(SHARD) == 1


def test_a_connection_that_is_cut_is_resumed_where_it_ended(either: Desk):
    either.hub.fault(SHARD, Fault("cut", 70_000), Fault("cut", 60_000), Fault("cut", 90_000))
    either.pull()
    assert either.same_files()
    ranges = [asked.headers["Range"] for asked in either.hub.asked if asked.place == "storage" and asked.path == SHARD]
    first = [int(text.removeprefix("bytes=").removesuffix("-")) for text in ranges]
    assert len(first) == 4
    assert first[0] == 0
    assert first == sorted(set(first))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.lists(
        st.one_of(
            st.builds(Fault, st.sampled_from(["cut"]), st.integers(0, SHARD_BYTES - 1)),
            st.builds(Fault, st.sampled_from(["chunked", "gzip", "ignore_range", "drop"])),
            st.builds(Fault, st.just("status"), status=st.sampled_from([403, 408, 429, 500, 502, 503, 504])),
        ),
        max_size=6,
    )
)
def test_any_mixture_of_faults_ends_with_the_right_bytes(desk: Desk, faults: list[Fault]):
    shutil.rmtree(desk.models / "model", ignore_errors=True)
    desk.hub.faults.clear()
    desk.hub.fault(SHARD, *faults)
    desk.pull()
    assert desk.same_files()
    assert leftovers(desk) == []


@pytest.mark.parametrize("kind", ["stall", "dribble"])
def test_a_connection_that_delivers_next_to_nothing_is_dropped_and_resumed(desk: Desk, kind: str):
    desk.hub.fault(SHARD, Fault(kind, 100_000))
    desk.pull()
    assert desk.same_files()
    assert desk.hub.count(SHARD) == 2
    assert [event["path"] for event in desk.told("retry")] == [SHARD]


def test_a_connection_that_never_delivers_fails_after_eight_tries_and_keeps_what_there_is(desk: Desk):
    desk.limited(progress=64 << 10)
    desk.hub.always["storage", SHARD] = Fault("cut", 50)
    with pytest.raises(PeerError, match="in 8 tries"):
        desk.pull()
    assert desk.hub.count(SHARD) == 8
    assert not (desk.models / "model" / SHARD).exists()
    del desk.hub.always["storage", SHARD]
    desk.pull()
    assert desk.same_files()


def test_another_etag_throws_the_part_away(desk: Desk):
    desk.hub.fault(SHARD, Fault("cut", 100_000))

    def change(event: dict[str, object]) -> None:
        if event["event"] == "retry":
            desk.hub.etag_suffix = "-new"

    desk.on_event = change
    desk.pull()
    assert desk.same_files()
    assert [event["path"] for event in desk.told("restart")] == [SHARD]
    assert [asked.status for asked in desk.hub.asked if asked.place == "storage" and asked.path == SHARD] == [206, 200]


def test_a_range_that_is_not_there_restarts_the_file(desk: Desk):
    desk.hub.fault(SHARD, Fault("cut", 100_000), Fault("unsatisfied"))
    desk.pull()
    assert desk.same_files()
    assert [event["path"] for event in desk.told("restart")] == [SHARD]


def test_a_part_that_is_longer_than_the_file_is_started_again(desk: Desk):
    folder = desk.models / "model"
    folder.mkdir()
    (folder / f"{SHARD}.part").write_bytes(bytes(2 * SHARD_BYTES))
    desk.pull()
    assert desk.same_files()


def test_the_same_size_with_other_bytes_is_refused_and_removed(either: Desk):
    either.hub.fault(SHARD, Fault("wrong"))
    with pytest.raises(FileError, match=rf"{SHARD}.*SHA-256"):
        either.pull()
    assert not (either.models / "model" / SHARD).exists()
    assert SHARD + ".part" not in leftovers(either)
    either.pull()
    assert either.same_files()


def test_a_list_that_lies_about_a_hash_is_refused(either: Desk):
    either.hub.repositories["tiny/model"].hashes[SHARD] = "a" * 64
    with pytest.raises(OnedeskError, match=SHARD):
        either.pull()
    assert not (either.models / "model" / SHARD).exists()


def test_a_small_file_with_other_bytes_is_refused(desk: Desk):
    desk.hub.fault("tokenizer_config.json", Fault("wrong"), place="hub")
    with pytest.raises(FileError, match="tokenizer_config"):
        desk.pull()
    assert not (desk.models / "model" / "tokenizer_config.json").exists()


def test_more_bytes_than_the_list_says_are_refused(desk: Desk):
    desk.hub.fault(SHARD, Fault("more"))
    with pytest.raises(PeerError, match="sends more than"):
        desk.pull()
    assert not (desk.models / "model" / SHARD).exists()


def test_a_file_whose_header_lies_is_not_kept(desk: Desk):
    files = desk.hub.repositories["tiny/model"].files
    files[SHARD] = files[SHARD][:8] + b"x" + files[SHARD][9:]
    with pytest.raises(FileError, match=SHARD):
        desk.pull()
    assert not (desk.models / "model" / SHARD).exists()


def test_a_signed_address_that_expires_is_asked_for_again(desk: Desk):
    desk.hub.fault(SHARD, Fault("cut", 100_000), Fault("status", status=403, text="expired"))
    desk.pull()
    assert desk.same_files()
    assert desk.hub.count(SHARD, "hub") == 3


def test_waiting_is_as_long_as_the_server_asks(desk: Desk):
    limited = Fault("status", status=429, headers={"ratelimit": '"api";r=0;t=0', "Retry-After": "900"})
    desk.hub.fault("/api/models/tiny/model/revision/main", limited, place="hub")
    desk.hub.fault(SHARD, Fault("status", status=503), Fault("status", status=503, headers={"Retry-After": "0"}))
    desk.pull()
    assert desk.same_files()
    waits = [event["wait"] for event in desk.told("retry")]
    assert waits[0] == 1
    assert waits[2] == 0


def test_a_wait_of_a_day_is_an_error_that_says_so(desk: Desk):
    desk.hub.fault(SHARD, Fault("status", status=429, headers={"Retry-After": "86400"}))
    with pytest.raises(PeerError, match="86400 s"):
        desk.pull()


@pytest.mark.parametrize("place", ["hub", "storage"])
def test_a_web_page_in_place_of_a_file_is_named(desk: Desk, place: str):
    desk.hub.fault(SHARD, Fault("html"), place=place)
    with pytest.raises(PeerError, match="web page instead of"):
        desk.pull()
    assert not (desk.models / "model" / SHARD).exists()


def test_a_web_page_in_place_of_the_list_is_named(desk: Desk):
    desk.hub.fault("/api/models/tiny/model/revision/main", Fault("html"), place="hub")
    with pytest.raises(PeerError, match="web page instead of JSON"):
        desk.pull()


def test_a_branch_that_moves_meanwhile_does_not_matter(desk: Desk):
    repository = desk.hub.repositories["tiny/model"]
    plan = desk.plan()
    assert plan.folders[0].commit == "c" * 40
    desk.hub.fault(SHARD, Fault("cut", 1000))
    desk.pull()
    asked = [entry.path for entry in desk.hub.asked if entry.place == "hub" and "resolve" in entry.path]
    assert asked == []
    assert all(entry.path != "/api/models/tiny/model/tree/main" for entry in desk.hub.asked)
    assert repository.commit == json.loads((desk.models / "model" / "onedesk.json").read_text())["commit"]


def test_a_renamed_repository_is_followed_and_told(desk: Desk):
    desk.hub.repositories["old/name"] = type(desk.hub.repositories["tiny/model"])({}, moved_to="tiny/model")
    plan = desk.plan("old/name")
    assert plan.renamed == "tiny/model"
    desk.pull("old/name")
    assert desk.same_files()


@pytest.mark.parametrize(
    ("fault", "error", "words"),
    [
        (Fault("status", status=403, headers={"X-Error-Code": "GatedRepo"}), PeerError, "gated.*huggingface.token"),
        (Fault("status", status=401, headers={"X-Error-Code": "GatedRepo"}), PeerError, "accept them on http"),
        (Fault("status", status=404, headers={"X-Error-Code": "RepoNotFound"}), ModelError, "no model tiny/model"),
        (Fault("status", status=401), ModelError, "no model tiny/model.*private one needs a token"),
        (Fault("status", status=404, headers={"X-Error-Code": "RevisionNotFound"}), ModelError, "no revision 'main'"),
        (Fault("status", status=418), PeerError, "answers 418"),
    ],
)
def test_a_refusal_of_the_list_is_one_line_with_what_to_do(
    desk: Desk, fault: Fault, error: type[OnedeskError], words: str
):
    desk.hub.fault("/api/models/tiny/model/revision/main", fault, place="hub")
    with pytest.raises(error, match=words) as found:
        desk.pull()
    assert "\n" not in str(found.value)
    assert list(desk.models.iterdir()) == []


def test_a_refusal_of_a_file_names_it(desk: Desk):
    desk.hub.fault(SHARD, Fault("status", status=404, headers={"X-Error-Code": "EntryNotFound"}), place="hub")
    with pytest.raises(ModelError, match=f"no file '{SHARD}'"):
        desk.pull()


def test_a_full_disk_is_told_before_the_first_byte(desk: Desk):
    desk.limited(reserve=1 << 60)
    with pytest.raises(FileError, match=r"are missing.*free \d"):
        desk.pull()
    assert desk.hub.count(SHARD) == 0


def test_a_disk_that_fills_up_keeps_what_has_arrived(desk: Desk):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, before[1]))
        with pytest.raises(FileError, match=r"took no more.*is kept"):
            desk.pull()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not (desk.models / "model" / SHARD).exists()
    desk.pull()
    assert desk.same_files()


@pytest.mark.parametrize(
    "name",
    [
        "../outside.json",
        "/etc/outside.json",
        "a/../../outside.json",
        "a\\b.json",
        "nul\0.json",
        "x" * 300 + ".json",
        "a//b.json",
        ".git/x.json",
    ],
)
def test_a_hostile_name_is_refused_and_nothing_is_written(desk: Desk, name: str):
    desk.hub.repositories["tiny/model"].files[name] = b"{}"
    with pytest.raises(FileError, match=r"is refused|nothing was written"):
        desk.pull(globs=("*.json",))
    assert list(desk.models.iterdir()) == []


def test_names_that_some_disks_cannot_tell_apart_are_refused(desk: Desk):
    desk.hub.repositories["tiny/model"].files |= {"A.json": b"1", "a.json": b"2"}
    with pytest.raises(FileError, match="one name on some disks"):
        desk.pull(globs=("*.json",))


def test_a_repository_of_ten_thousand_files_is_listed_and_only_the_chosen_ones_are_fetched(desk: Desk):
    desk.hub.page_rows = 1000
    desk.hub.repositories["tiny/model"].files |= {f"pictures/{i}.png": b"x" for i in range(10_000)}
    assert {file["path"] for file in desk.pull()["files"]} == CHOSEN


@pytest.mark.parametrize("glob", ["*.bin", "*.py", "*"])
def test_what_can_run_code_is_never_fetched(desk: Desk, glob: str):
    with pytest.raises(OnedeskError, match="can run code"):
        desk.pull(globs=(glob,))


def test_the_token_goes_to_the_hub_and_to_nobody_else(desk: Desk):
    desk.hub.repositories["tiny/model"].token = TOKEN
    desk.environment["HF_TOKEN"] = TOKEN
    desk.hub.fault(SHARD, Fault("cut", 1000), Fault("status", status=429, headers={"Retry-After": "0"}))
    desk.pull()
    assert desk.same_files()
    assert all(
        asked.headers.get("Authorization") == f"Bearer {TOKEN}" for asked in desk.hub.asked if asked.place == "hub"
    )
    for asked in desk.hub.asked:
        if asked.place == "storage":
            assert TOKEN not in json.dumps(asked.headers)
    assert TOKEN not in json.dumps(desk.events)
    assert TOKEN not in (desk.models / "model" / "onedesk.json").read_text()


def test_modelscopes_token_is_a_cookie_for_the_hub_alone(tmp_path: Path, hub: Hub):
    desk = make_desk(tmp_path / "tree", hub, "modelscope")
    hub.repositories["tiny/model"].token = TOKEN
    with pytest.raises(PeerError, match=r"modelscope.token"):
        desk.pull()
    desk.environment["MODELSCOPE_API_TOKEN"] = TOKEN
    desk.pull()
    assert desk.same_files()
    assert all(TOKEN not in json.dumps(asked.headers) for asked in hub.asked if asked.place == "storage")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("http://10.0.0.1/file", "private address|without encryption"),
        ("https://10.0.0.1/file", "private address 10.0.0.1"),
        ("https://169.254.169.254/latest/meta-data", "never address"),
        ("https://[::ffff:192.168.0.1]/file", "private address"),
        ("https://0.0.0.0/file", "never address"),
        ("ftp://example.org/file", "scheme 'ftp'"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://example.org/file", "without encryption"),
        ("https://user:word@example.org/file", "password"),
    ],
)
def test_a_redirect_that_leads_astray_is_not_followed(desk: Desk, target: str, words: str):
    desk.hub.fault(SHARD, Fault("redirect", text=target))
    with pytest.raises(PeerError, match=words):
        desk.pull()
    assert not (desk.models / "model" / SHARD).exists()


def test_a_circle_of_redirects_ends(desk: Desk):
    desk.hub.always["storage", SHARD] = Fault("redirect", text=f"{desk.hub.storage}/tiny/model/{'c' * 40}/{SHARD}")
    with pytest.raises(PeerError, match="redirects more than 5 times"):
        desk.pull()


def test_modelscopes_error_with_status_200_is_an_error(tmp_path: Path, hub: Hub):
    desk = make_desk(tmp_path / "tree", hub, "modelscope")
    with pytest.raises(ModelError, match=r"no model tiny/other.*record not found"):
        desk.pull("tiny/other")
    hub.fault(
        "/api/v1/models/tiny/model/repo/files",
        Fault("json", text='{"Code": 500, "Success": false, "Message": "busy"}'),
        place="hub",
    )
    with pytest.raises(PeerError, match=r"answers 500.*busy"):
        desk.pull()


def test_modelscopes_list_that_is_cut_is_walked_by_folder(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    from onedesk.service.hub import modelscope

    desk = make_desk(tmp_path / "tree", hub, "modelscope")
    hub.repositories["tiny/model"].files |= {f"a/{i:04d}.txt": b"x" for i in range(3000)}
    with pytest.raises(ModelError, match="3000 or more files in one folder"):
        desk.pull()
    hub.repositories["tiny/model"].files = {
        path: content for path, content in hub.repositories["tiny/model"].files.items() if not path.startswith("a/")
    } | {f"a/{i % 3}/{i:04d}.txt": b"x" for i in range(3000)}
    assert modelscope.CUT == hub.cut_list_at == 3000
    assert {file["path"] for file in desk.pull()["files"]} == CHOSEN
    assert desk.same_files()


def test_a_hub_that_is_down_is_replaced_by_the_next_one(tmp_path: Path, hub: Hub):
    desk = make_desk(tmp_path / "tree", hub)
    text = f'[hub]\nendpoints = ["http://127.0.0.1:9"]\nmodelscope = "{hub.address}"\norder = ["hf", "modelscope"]\n'
    (desk.tree / "onedesk.toml").write_text(text)
    desk.pull()
    assert desk.same_files()
    assert [event["host"] for event in desk.told("fallback")] == ["127.0.0.1"]


def test_two_pulls_of_one_folder_do_not_meet(desk: Desk):
    from onedesk.service.hub.lock import locked

    with locked(desk.models / "model"), pytest.raises(FileError, match=r"process \d+ is pulling into model"):
        desk.pull()
    desk.pull()
    assert desk.same_files()


def test_a_new_commit_replaces_what_changed_and_drops_what_went(desk: Desk):
    desk.pull()
    repository = desk.hub.repositories["tiny/model"]
    old = repository.files[SHARD]
    repository.files = {path: content for path, content in repository.files.items() if "-of-00002" not in path}
    repository.files["model.safetensors"] = tensor_file("t", 5)
    del repository.files["model.safetensors.index.json"]
    repository.commit = "d" * 40
    (desk.models / "model" / "notes.txt").write_text("mine")
    done = desk.pull()
    assert done["commit"] == "d" * 40
    assert not (desk.models / "model" / SHARD).exists()
    assert (desk.models / "model" / "notes.txt").read_text() == "mine"
    assert (desk.models / "model" / "model.safetensors").read_bytes() != old


def test_a_file_that_no_pull_put_there_is_never_replaced(desk: Desk):
    (desk.models / "model").mkdir()
    (desk.models / "model" / "config.json").write_text('{"mine": true}')
    with pytest.raises(FileError, match=r"was not pulled.*--as NAME"):
        desk.pull()
    assert (desk.models / "model" / "config.json").read_text() == '{"mine": true}'
    desk.pull(folder_name="other")
    assert desk.same_files(folder="other")


def test_a_link_in_the_way_is_refused(desk: Desk, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (desk.models / "model").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FileError, match="symlink"):
        desk.pull()
    (desk.models / "model").unlink()
    (desk.models / "model").mkdir()
    (desk.models / "model" / f"{SHARD}.part").symlink_to(tmp_path / "elsewhere" / "file")
    with pytest.raises(FileError, match="not a regular file"):
        desk.pull()
    assert list((tmp_path / "elsewhere").iterdir()) == []
