"""Knowledge bases: what is read, how it is cut, what is found, and that a stop at any time loses nothing."""

from __future__ import annotations

import io
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from onedesk.service.errors import Cancelled, FileError, RequestError
from onedesk.service.knowledge import office_text
from onedesk.service.knowledge.base import KnowledgeBase, base_of, bases
from onedesk.service.knowledge.pieces import CAP, cut, weight
from onedesk.service.knowledge.plain_text import SourceText, decode_text, read_markdown
from onedesk.service.knowledge.read_source import text_of

HANDBOOK = """# Kiln handbook
## Firing
Heat the kiln to 950 degrees over six hours. Never open the door above 200 degrees.
## Glazes
The blue glaze needs cobalt oxide. Store glaze powder in the dry cupboard.
## Opening hours
The workshop opens at nine and closes at six; on Sundays it stays closed.
## Deliveries
Clay arrives on Monday before ten. Sign the paper at the side door.
## Waste
Dry scraps go into the grey bin, wet scraps into the recycling bucket.
## Safety
Wear a mask when sanding. Goggles hang beside the grinder.
## Membership
A membership costs forty a month and includes one shelf.
## Classes
Beginners meet on Tuesday evening; wheel throwing is on Thursday.
## Lost things
Lost things are kept in the office for thirty days.
# 窑炉手册
## 清洁
每周五用湿布清洁窑炉的内壁。不要使用洗涤剂。
## 借用工具
借用转盘需要提前两天登记，并交五十元押金。
## 急救
烫伤时立即用冷水冲洗二十分钟，然后联系管理员。
## 会员
会员每月四十元，包括一个架子。
## 课程
初学者每周二晚上上课，拉坯课在周四。
## 停车
请把车停在后院，不要挡住卸货区。
## 垃圾
干废料放进灰色的桶，湿废料放进回收桶。
## 配方
青瓷釉 celadon 的配方含百分之二的氧化铁 iron oxide。
"""
# (question, a text that its answer has)
QUESTIONS = [
    ("how hot does the kiln get", "950"), ("may I open the kiln door when it is hot", "Never open"),
    ("what is in the blue glaze", "cobalt"), ("where is glaze powder stored", "dry cupboard"),
    ("when does the workshop open", "nine"), ("is it closed on Sunday", "Sundays"),
    ("firing temperature and hours", "six hours"), ("cobalt", "cobalt"), ("workshop closing time", "closes at six"),
    ("glaze storage", "dry cupboard"), ("窑炉怎么清洁", "湿布"), ("可以用洗涤剂吗", "洗涤剂"), ("怎样借用转盘", "登记"),
    ("押金多少", "五十元"), ("烫伤怎么办", "冷水"), ("联系谁", "管理员"), ("内壁", "湿布"), ("提前几天登记", "两天"),
    ("急救", "冷水"), ("氧化铁的含量", "百分之二"), ("celadon 的配方", "氧化铁"), ("青瓷 iron oxide", "氧化铁"),
    ("kiln 清洁", "湿布"), ("借用 wheel 登记", "登记"), ("烫伤 first aid 冷水", "冷水"), ("blue glaze 配方", "cobalt"),
    ("ＫＩＬＮ ＤＯＯＲ", "Never open"), ("workshop 押金", "五十元"), ("Sunday 急救", "冷水"), ("iron", "氧化铁"),
]  # fmt: skip


def zipped(parts: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in parts.items():
            archive.writestr(name, text)
    return made.getvalue()


def docx(body: str, before: str = "") -> bytes:
    return zipped({"word/document.xml": f'{before}<w:document xmlns:w="w"><w:body>{body}</w:body></w:document>'})


def paragraph(text: str, style: str = "") -> str:
    named = f'<w:pPr><w:pStyle w:val="{style}"/></w:pPr>' if style else ""
    return f"<w:p>{named}<w:r><w:t>{text}</w:t></w:r></w:p>"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "documents"
    made.mkdir()
    return made


@pytest.fixture
def base(tmp_path: Path) -> KnowledgeBase:
    return base_of(tmp_path / "bases", "desk")


def test_thirty_questions_find_their_answers(base: KnowledgeBase, folder: Path) -> None:
    (folder / "handbook.md").write_text(HANDBOOK, encoding="utf-8")
    base.add([folder])
    found = [any(answer in piece.text for piece in base.search(question, 5)) for question, answer in QUESTIONS]
    assert len(found) == 30
    assert sum(found) / 30 >= 0.8
    first = base.search("cobalt oxide", 1)[0]
    text = (folder / "handbook.md").read_text(encoding="utf-8")
    assert first.heading == "Kiln handbook > Glazes"
    assert text[first.start : first.end] == first.text


def test_formats_give_text_and_headings(tmp_path: Path) -> None:
    html = "<title>T</title><script>x()</script><h2>Mats &amp; cats</h2><p>One <b>cat</b></p>"
    odt = '<d xmlns:t="t"><t:h t:outline-level="2">Mats</t:h><t:p>One <t:span>cat</t:span></t:p></d>'
    container = '<container><rootfiles><rootfile full-path="O/p.opf"/></rootfiles></container>'
    package = '<p><item id="a" href="a%20b.xhtml"/><itemref idref="a"/></p>'
    epub = {
        "META-INF/container.xml": container,
        "O/p.opf": package,
        "O/a b.xhtml": "<!DOCTYPE html><h2>Mats</h2>One cat",
    }
    for name, content in {
        "a.html": html.encode(),
        "a.docx": docx(paragraph("Mats", "Heading2") + paragraph("One cat")),
        "a.odt": zipped({"content.xml": odt}),
        "a.epub": zipped(epub),
        "a.md": "## Mats\nOne cat\n```\n# no heading\n```\n".encode("utf-16"),
    }.items():
        source = text_of(content, tmp_path / name)
        assert "One cat" in source.text, name
        assert "x()" not in source.text
        assert [title.split(" &")[0] for _, level, title in source.headings if level == 2] == ["Mats"], name
        assert "no heading" not in [title for _, _, title in source.headings]
    assert decode_text("猫在垫子上".encode("gb18030"), "a") == "猫在垫子上"
    assert decode_text(b"\xef\xbb\xbfcat", "a") == "cat"


def test_hostile_files_are_named_and_the_others_are_read(
    base: KnowledgeBase, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(office_text, "UNPACKED_LIMIT", 1 << 20)
    entity = '<!DOCTYPE d [<!ENTITY a "b">]>'
    bad = {
        "bomb.docx": (docx(paragraph("x" * (2 << 20))), "unpacks to more than"),
        "entity.docx": (docx(paragraph("&a;"), entity), "DOCTYPE"),
        "deep.docx": (docx("<w:a>" * 600 + "</w:a>" * 600), "nests XML deeper"),
        "cut.docx": (docx(paragraph("cat"))[:40], "damaged or encrypted"),
        "empty.odt": (zipped({}), "damaged or encrypted"),
        "xml.odt": (zipped({"content.xml": "<a>"}), "XML that cannot be read"),
        "binary.txt": (b"\0\1\2", "null bytes"),
    }
    for name, (content, _) in bad.items():
        (folder / name).write_bytes(content)
    (folder / "good.txt").write_text("one cat")
    Path(os.fsdecode(os.fsencode(folder) + b"/\xff.txt")).write_text("one cat")
    bad["\\udcff.txt"] = (b"", "not UTF-8")
    report = base.add([folder])
    assert report.added == [str(folder / "good.txt")]
    assert {Path(path).name for path in report.failed} == set(bad)
    for path, reason in report.failed.items():
        assert bad[Path(path).name][1] in reason


def test_pieces_follow_the_structure_and_have_every_word() -> None:
    text = "# A\n" + "One cat sat. " * 400 + "\n\n## B\n" + "猫坐在垫子上。" * 200 + "\n\n" + "x" * 9000
    pieces = cut(read_markdown(text))
    assert "".join("".join(piece.text.split()) for piece in pieces) == "".join(text.split())
    assert max(weight(piece.text) for piece in pieces) <= CAP
    assert {piece.heading for piece in pieces} == {"A", "A > B"}
    assert all(text[piece.start : piece.end] == piece.text for piece in pieces)
    assert cut(SourceText(" \n ")) == []


def test_an_update_reads_only_what_changed(base: KnowledgeBase, folder: Path) -> None:
    for name in ("a", "b", "c"):
        (folder / f"{name}.txt").write_text(f"word{name}")
    assert len(base.add([folder]).added) == 3
    (folder / "a.txt").write_text("newword")
    (folder / "b.txt").unlink()
    (folder / "d.txt").write_text("wordd")
    report = base.update()
    assert [Path(path).name for path in (*report.added, *report.changed, *report.removed)] == [
        "d.txt",
        "a.txt",
        "b.txt",
    ]
    assert report.unchanged == 1
    assert not [*base.search("worda"), *base.search("wordb")]
    assert base.search("newword")
    assert base.counts() == (3, 3)


@pytest.mark.parametrize("query", ['"', "a AND", "heading:cat", "NEAR(a b)", "cat*", "'; drop table piece; --", "^cat"])
def test_a_query_is_never_an_expression(base: KnowledgeBase, folder: Path, query: str) -> None:
    (folder / "a.txt").write_text("one cat")
    base.add([folder])
    if query == '"':
        with pytest.raises(RequestError, match="no words"):
            base.search(query)
    else:
        base.search(query)
    assert base.search("cat")


def test_two_writers_a_full_disk_and_a_damaged_file_are_named(
    base: KnowledgeBase, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "a.txt").write_text("one cat")
    base.add([folder])
    connect = sqlite3.connect

    def impatient(file: Path, **options: object) -> sqlite3.Connection:
        made = connect(file, timeout=0.1, isolation_level=None)
        made.execute("pragma max_page_count = 40")
        return made

    monkeypatch.setattr(sqlite3, "connect", impatient)
    other = connect(base.file, isolation_level=None)
    other.execute("begin immediate")
    with pytest.raises(RequestError, match="another process writes"):
        base.add([folder])
    assert base.search("cat")  # readers do not wait for a writer
    other.execute("rollback")
    other.close()
    (folder / "b.txt").write_text(" ".join(map(str, range(90_000))))
    with pytest.raises(FileError, match="disk is full"):
        base.update()
    assert base.counts() == (1, 1)
    assert base.search("cat")
    base.remove()
    assert bases(base.file.parent) == []
    base.file.write_bytes(b"no database" * 100)
    with pytest.raises(FileError, match="cannot be used"):
        base.search("cat")


def test_names_and_stops(base: KnowledgeBase, folder: Path) -> None:
    for name in ("", "../a", ".hidden", "a/b", "x" * 65):
        with pytest.raises(RequestError, match="is not a name"):
            base_of(base.file.parent, name)
    with pytest.raises(RequestError, match="there is no knowledge base 'desk'; bases: none"):
        base.search("cat")
    (folder / "a.txt").write_text("one cat")
    with pytest.raises(Cancelled):
        base.add([folder], lambda: True)
    with pytest.raises(RequestError, match="does not exist"):
        base.add([folder / "none"])


def test_an_addition_killed_at_any_time_loses_and_repeats_nothing(base: KnowledgeBase, folder: Path) -> None:
    for number in range(150):
        (folder / f"{number}.txt").write_text(f"unique{number} " + "cat " * 200)
    code = (
        "import sys; from pathlib import Path; from onedesk.service.knowledge.base import KnowledgeBase;"
        " KnowledgeBase(Path(sys.argv[1])).add([Path(sys.argv[2])])"
    )
    chance, base_file = random.Random(1), base.file
    for _ in range(4):
        process = subprocess.Popen([sys.executable, "-c", code, str(base_file), str(folder)])
        time.sleep(chance.uniform(0.15, 0.6))
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    base.add([folder])
    assert base.counts()[0] == 150
    for number in range(150):
        assert len(base.search(f"unique{number}", 10)) == 1
    with sqlite3.connect(base_file) as connection:
        assert connection.execute("pragma integrity_check").fetchone() == ("ok",)
        assert connection.execute("select count(*) from search").fetchone() == (base.counts()[1],)
