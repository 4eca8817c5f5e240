"""The commands in the documents' blocks of shell, and why some of them are not run."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```(?P<kind>\w*)[^\n]*\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
HEREDOC = re.compile(r"<<'(\w+)'")
PROGRAMS = re.compile(r"(?:[A-Z_]+=\S+ +)*(?:git|planish|nice|python|pip|make|inspect|export) ")
"""How a block without the name of a language begins if it is one of shell. Others are output,
diagrams, or fragments of Python."""

NOT_RUN = {
    r"git clone |make |\. \.venv|python3? -m (venv|pytest)|pip install|export |\w+=\S+ python -m pytest": "sets"
    " up the reader's shell, or runs tests",
    r"(OMP_NUM_THREADS=\d+ )?python benchmarks/": "measures for minutes; tests/benchmarks runs them "
    "with small sizes",
    r"([A-Z_]+=\S+ |nice -n 19 )*python -m planish\.recipes": "its options "
    "are read by tests/test_docs.py, and tests/recipes/test_fresh_runs.py runs each recipe",
    r"(OMP_NUM_THREADS=\d+ )?python examples/": "tests/test_examples.py runs the examples",
    r"planish serve": "does not end; tests/test_doc_servers.py runs what the pages do with a server",
    r"planish sweep ": "trains several runs; tests/commands/test_sweep.py runs a sweep",
    r"planish console": "does not end; tests/console runs it",
    r"planish fleet ": "needs a server with replicas; tests/fleet/test_served_fleet.py runs it",
    r"planish run ": "needs a script of the reader's; tests/commands/test_run.py runs such",
    r"planish models --fetch": "downloads a model",
    r"planish chat --model tinker://\.\.\.": "is no complete command",
    r"planish eval .*(--base-url|Qwen|tests/evaluation|gsm8k --model HuggingFaceTB)": "needs"
    " a server, a large model or the hub; tests/evaluation runs such commands",
    r"inspect (eval|view)": "needs a task of the reader's; tests/evaluation/test_inspect.py runs one",
    r"python -m tinker_cookbook|\S+ tests/server/cookbook_run|python tests/server/conformance": "runs "
    "for minutes; tests/cookbook has a part of it",
    r"python -m marimo export": "trains for minutes; tests/test_examples.py runs the notebook",
    r"python your_script|sed -i|claude ": "needs a file or an account of the reader's",
    r"curl \S+/(un)?load_lora_adapter": "needs an adapter of the reader's; tests/server/openai loads "
    "and unloads adapters",
    r"curl \S+/v1/completions|python - <<": "tests/test_doc_servers.py runs it with a server",
    r"sudo |journalctl|podman ": "changes the machine; tests/test_release.py checks the "
    "container file",
    r"planish checkpoints import \S+ (--base-url|--base-model Qwen)|planish export outputs": "needs an "
    "adapter of another program; tests/export imports and merges such",
    r"planish inspect-logs": "needs planish[inspect]; tests/evaluation/test_inspect_logs.py runs it",
    r"planish doctor --(gpu-report|plan)": "needs a GPU, or the files of a large model; tests/doctor "
    "runs it",
    r"head=|srun |sleep ": "needs a cluster; tests/fleet starts several processes",
    r"\S* ?vllm serve ": "needs vLLM and a model of the hub; make test-vllm starts vLLM itself",
    r"planish rollouts .*--eval": "needs a run with an evaluation; "
    "tests/commands/test_rollouts_command.py has one",
    r"planish runs --base-url|planish checkpoints publish": "needs a server; tests/commands/test_cli_commands.py runs it",
}
"""Commands that are not run as they stand, with the reason and the place of their test."""
TUTORIALS = {
    "docs/guide/team-server.md": "tests/test_team_tutorial.py runs the whole page as one script"
}
"""Pages whose commands belong together, with the place of their test."""


@dataclass(frozen=True)
class Command:
    """A command of a page. A block of input (`<<`) belongs to it."""

    page: str
    text: str

    @property
    def reason(self) -> str | None:
        """Why it is not run; None if tests/test_doc_commands.py runs it."""
        if self.page in TUTORIALS:
            return TUTORIALS[self.page]
        return next((why for form, why in NOT_RUN.items() if re.match(form, self.text)), None)


def shell_blocks(page: Path) -> Iterator[str]:
    """Yield the blocks of shell of a page."""
    for fence in FENCE.finditer(page.read_text(encoding="utf-8")):
        is_shell = fence["kind"] in ("sh", "bash")
        if is_shell or (not fence["kind"] and PROGRAMS.match(fence["body"])):
            yield fence["body"]


def commands_of(block: str) -> list[str]:
    """Return the commands of a block, without comments: those after `#`, or after two spaces."""
    commands, lines = [], iter(block.splitlines())
    for line in lines:
        while line.endswith("\\"):
            line = line[:-1].rstrip() + " " + next(lines).strip()
        if heredoc := HEREDOC.search(line):
            inputs = []
            for text in lines:
                inputs.append(text)
                if text == heredoc[1]:
                    break
            line = "\n".join([line, *inputs])
        else:
            line = re.split(r"\s+#\s|\s{2,}", line.strip())[0]
        if line and not line.startswith("#"):
            commands.append(line)
    return commands


def all_commands() -> list[Command]:
    """Return the commands of all pages, in their order."""
    return [
        Command(page.relative_to(ROOT).as_posix(), text)
        for page in PAGES
        for block in shell_blocks(page)
        for text in commands_of(block)
    ]
