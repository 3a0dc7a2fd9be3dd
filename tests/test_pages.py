"""What the pages point at is there, what they tell to type is a command, and no page or source says whose machine it was."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from proxy import cli

ROOT = Path(__file__).parent.parent
FOLDERS = (ROOT, ROOT / "docs", ROOT / "deploy")
PAGES = [page for folder in FOLDERS for page in sorted(folder.glob("*.md"))]
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


# -- commands in the pages --------------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """`tierline …` in blocks of code and in `code`; continued lines are joined, pipes and comments cut."""
    blocks = re.findall(r"^```.*?\n(.*?)^```|^((?:(?: {4}|\t).*\n)+)", text, re.MULTILINE | re.DOTALL)
    for block in blocks:
        for row in "".join(block).replace("\\\n", " ").splitlines():
            for part in row.strip().removeprefix("$ ").split(" | "):
                if part.strip().startswith("tierline "):
                    yield part.strip()
    yield from re.findall(r"(?<!`)`(tierline [^`\n]+)`(?!`)", text)


def parse(arguments: list[str]) -> None:
    """What click does before it calls the command."""
    command: click.Command = cli.main
    context = command.make_context("tierline", arguments)
    while isinstance(command, click.Group):
        rest = [*context._protected_args, *context.args]
        _, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command = found
        context = command.make_context(command.name, rest, parent=context)


@each_page
def test_the_commands_in_the_pages_are_commands(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in re.findall(r"--script (\S+)", page.read_text("utf-8")):
        (tmp_path / name.strip("`")).touch()
    monkeypatch.chdir(tmp_path)
    for command in commands(page.read_text("utf-8")):
        try:
            parse(shlex.split(command, comments=True)[1:])
        except click.ClickException as error:
            # A command may be named alone; one with options is to be typed.
            missing = isinstance(error, click.MissingParameter) and isinstance(error.param, click.Argument)
            if missing and " -" not in command:
                continue
            pytest.fail(f"{page.name}: {command}: {error.format_message()}")


def test_commands_are_found_and_wrong_ones_are_told() -> None:
    text = (
        "# x\n\n```sh\n$ cat key | tierline keys hash --name x\ntierline check \\\n  --prob\n```\n\n"
        "    tierline serve\n\n`tierline no`\n"
    )
    found = list(commands(text))
    assert found == [
        "tierline keys hash --name x",
        "tierline check    --prob",
        "tierline serve",
        "tierline no",
    ]
    for command, fails in zip(found, (False, True, False, True), strict=True):
        if fails:
            with pytest.raises(click.ClickException):
                parse(shlex.split(command)[1:])
        else:
            parse(shlex.split(command)[1:])


# -- links -----------------------------------------------------------------------------------------------------


def anchors(text: str) -> set[str]:
    """The ids that a page's headings get."""
    titles = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    text = page.read_text("utf-8")
    targets = re.findall(r"\]\(([^)\s]+)\)|(?:src|href)=\"([^\"]+)\"", re.sub(r"`[^`\n]*`", "", text))
    for target in ("".join(pair) for pair in targets):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        there = page.parent / file if file else page
        assert there.exists(), f"{page.name}: {target}"
        if anchor:
            assert anchor in anchors(there.read_text("utf-8")), f"{page.name}: {target}"


# -- the tree --------------------------------------------------------------------------------------------------

# Somebody's folders (inside a container, behind the colon of a mount, they are fine), and hosts that packages come from.
MACHINE_PATHS = re.compile(
    r"(?<![\w.~}:])/(?:work|root|Users/\w+|home/(?!someone\b)\w+|tmp/w)/|/opt/(?:wheels|pypi)"
)
REGISTRIES = re.compile(
    r"https?://[^/\s\"']*(?:pypi|pythonhosted|npmjs|artifactory|nexus|registry|mirror)[^/\s\"']*|(?:extra-)?index-url[ =]+\S*://",
    re.IGNORECASE,
)
# Recorded or invented conversations may talk of files.
TALK = re.compile(r"tests/wire/\w+\.jsonl$")


def tree() -> Iterator[Path]:
    """Files under version control, and new ones that would be; without git, everything that is not hidden."""
    asked = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(asked, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        names = [name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [
            str(path.relative_to(ROOT))
            for path in ROOT.rglob("*")
            if "/." not in str(path.relative_to(ROOT.parent))
        ]
    for name in names:
        if (ROOT / name).is_file() and not TALK.search(name):
            yield ROOT / name


def test_no_path_of_a_machine_and_no_registry_is_in_the_tree() -> None:
    own = [str(path) for path in {ROOT, Path.home()} if len(path.parts) > 2]
    found = []
    for path in tree():
        text = path.read_text("utf-8", "replace")
        for pattern in (MACHINE_PATHS, REGISTRIES):
            found += [f"{path.relative_to(ROOT)}: {match[0]}" for match in pattern.finditer(text)]
        found += [f"{path.relative_to(ROOT)}: {name}" for name in own if name in text]
    assert found == []


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("see /{}/x/y.py", True),
        ('File "/home/{}/x.py"', True),
        ("pip install --index-url" + " https://{}.example/simple", True),
        ("https://{}.org/project", False),
        ("GET /v1/{}/x", False),
    ],
)
def test_such_paths_and_hosts_are_told_from_others(text: str, bad: bool) -> None:
    made = text.format("work")
    assert bool(MACHINE_PATHS.search(made) or REGISTRIES.search(made)) is bad
