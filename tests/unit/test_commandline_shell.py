"""The reader of shell scripts: words as a shell has them, what is unknown, and bounds. bash itself is the reference."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lockstep.topology.shell_script import Script, follow
from lockstep.topology.shell_syntax import ShellError
from lockstep.topology.shell_values import Value

BASH = shutil.which("bash")

PLAIN = "abcXYZ019 _-./:=,@%+'\"\\$`!#&|;()<>*?[]{}~^\n\té"


def words_of(script: Script, program: str = "run") -> list[list[str]]:
    """Words of each command of that name, unknown pieces as they are written."""
    return [[word.text for word in i.words[1:]] for i in script.invocations if i.words[0].known == program]


def one(text: str, **given: str) -> list[str]:
    (words,) = words_of(follow(text, given=given))
    return words


@given(st.lists(st.text(alphabet=PLAIN, max_size=12), max_size=6))
@settings(max_examples=150, deadline=None)
def test_quoted_words_come_back_as_they_were(words: list[str]) -> None:
    assert one(f"run {shlex.join(words)}\n") == words


@given(st.text(alphabet="ab '\"\\\n", max_size=24))
@settings(max_examples=200, deadline=None)
def test_quoting_is_that_of_shlex(text: str) -> None:
    """Without expansions shlex knows the words (it ends a command at no newline, so there is none outside quotes)."""
    text += " z"  # a backslash at the very end is an error to shlex and a character to a shell
    try:
        expected = shlex.split(text, posix=True)
    except ValueError:
        with pytest.raises(ShellError):
            follow(f"run {text}")
        return
    try:
        script = follow(f"run {text}")
    except ShellError:
        pytest.fail(f"{text!r} is {expected} for shlex")
    if "\n" not in re.sub(r"'[^']*'|\"(?:\\.|[^\"\\])*\"|\\.", "", text, flags=re.DOTALL) and "\\\n" not in text:
        assert words_of(script) == [expected]


SNIPPETS = (
    'run ${A:-x} ${B-y} ${A:+z} ${N:+z} "${S}" $S ${#S} ${#ARR[@]} ${ARR[1]} "${ARR[@]}" ${ARR[*]}',
    "run $((N * 3 + 1)) $((N > 7 ? 1 : 2)) $((2 ** 5 % 7)) $(( (N - 10) / 3 )) $((0x1F & ~3)) $((N << 2))",
    'B=1; B=$((B+1)); ((B++)); ((B *= N)); run $B "$B"',
    "X=abcabc.tar.gz; run ${X%.*} ${X%%.*} ${X#*b} ${X##*b} ${X/b/_} ${X//b/_} ${X:2} ${X:1:3} ${X^^} ${X: -2}",
    'for i in 1 2 3; do if [ $i -eq 2 ]; then continue; fi; run "$i" $((i*i)); done',
    'for ((i=0; i<3; i++)); do ARR+=("$i"); done; run "${ARR[@]}"',
    'if [[ $N == 8 && "$S" == *two* ]]; then run yes; elif [ -z "$E" ]; then run no; else run never; fi',
    'case "$N" in 1|2) run few;; 8) run eight;; *) run other;; esac',
    'f() { local y=$1; run "$y" "$#" "$@"; }; f "a b" c',
    "x=1; while [ $x -lt 4 ]; do run $x; x=$((x + 1)); done",
    'A=1 B=2; export C="$A$B"; run "$C" \'$C\' "\\$C" a\\ b',
    "run a \\\n  b # c\n",
    'ARGS="--tp 2 --pp $N"; ARGS="$ARGS --ep 4"; run $ARGS "$ARGS"',
    'ARGS=(--a "x y" $S); ARGS+=(--b); run ${ARGS[@]} "${ARGS[@]}"',
    "[ $N -gt 4 ] && run big || run small",
    "[ $N -gt 9 ] && run big || run small",
    "! false && run negated; (N=3; run $N); run $N; { N=4; }; run $N",
    "set -- p 'q r'; run \"$2\" $#; shift; run $1",
    'V=N; run ${!V}; printf -v P "[%s]" "$N"; run "$P"; read -ra R <<< "a b  c"; run "${R[@]}"',
    'M="${U:=default}"; run $M $U; : ${W:=w}; run $W',
    'run $(echo a  b) "$(echo a  b)" $(seq 2 3 9)',
    'J=$(cat <<EOF\n{"a": "$N", \'b\': `echo x`}\nEOF\n); run "$J"',
    "run \"$(cat <<'EOF'\nraw $N\nEOF\n)\"",
    'IFS=,; run "${ARR[*]}"',
    "run $(basename /a/b/c.sh) $(dirname /a/b/c.sh)",
    "until [ $N -le 6 ]; do N=$((N-1)); done; run $N",
    'declare -i Q=3; typeset R2=4; readonly R3=5; run $Q $R2 $R3; unset Q; run "${Q-gone}"',
    'run "a${E}b" $E "$E" \'\' x',
)
PREAMBLE = 'N=8; S="one  two"; E=""; ARR=(p "q r" s)\n'


@pytest.mark.skipif(BASH is None, reason="bash is the reference")
@pytest.mark.parametrize("snippet", SNIPPETS)
def test_words_are_those_of_bash(snippet: str) -> None:
    recorder = 'run() { for w in "$#" "$@"; do builtin printf \'%s\\0\' "$w"; done; }\n'
    text = PREAMBLE + snippet
    result = subprocess.run(
        [BASH or "bash", "--norc", "-c", recorder + text],
        capture_output=True,
        text=True,
        env={},
        timeout=10,
        check=True,
    )
    flat = result.stdout.split("\0")[:-1]
    expected: list[list[str]] = []
    while flat:
        count = int(flat[0])
        expected.append(flat[1 : 1 + count])
        flat = flat[1 + count :]
    assert words_of(follow(text + "\n")) == expected


NUMBERS = st.integers(-40, 40)
OPERATORS = ("+", "-", "*", "<", ">", "==", "!=", "&", "|", "^", "&&", "||")
EXPRESSIONS = st.recursive(
    st.one_of(NUMBERS.map(str), st.sampled_from(["N", "K", "$N"])),
    lambda inner: st.one_of(
        st.tuples(inner, st.sampled_from(OPERATORS), inner).map(" ".join),
        inner.map(lambda text: f"({text})"),
        inner.map(lambda text: f"! ({text})"),
        st.tuples(inner, inner, inner).map(lambda p: f"({p[0]}) ? ({p[1]}) : ({p[2]})"),
    ),
    max_leaves=6,
)


@pytest.mark.skipif(BASH is None, reason="bash is the reference")
@given(st.lists(EXPRESSIONS, min_size=1, max_size=40))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_arithmetic_is_that_of_bash(expressions: list[str]) -> None:
    lines = [f"echo $(({text}))" for text in expressions]
    script = "N=8; K=-3\n" + "\n".join(lines)
    result = subprocess.run([BASH or "bash", "-c", script], capture_output=True, text=True, timeout=20, check=True)
    ours = follow("N=8; K=-3\n" + "\n".join(line.replace("echo", "run") for line in lines) + "\n")
    assert [words[0] for words in words_of(ours)] == result.stdout.split()


@pytest.mark.parametrize(
    ("text", "shown", "variable"),
    [
        ("run $(nvidia-smi | wc -l)", "$(nvidia-smi | wc -l)", ""),
        ("N=$(nproc); run $N", "$(nproc)", "N"),
        ("run `hostname`", "`hostname`", ""),
        ("run $HOME/x", "$HOME/x", "HOME"),
        ("run ${1}", "${1}", "1"),
        ("run $((WORLD * 8))", "$((WORLD * 8))", "WORLD"),
        ("read X; run $X", "${X}", "X"),
        ("run ${A@Q}", "${A@Q}", "A"),
        ("declare -A M; M[key]=1; run ${M[key]}", "${M[key]}", ""),
        ("run $RANDOM$$", "$RANDOM$$", "RANDOM"),
        ("if grep -q x y; then A=1; else A=2; fi; run $A", "${A}", "A"),
    ],
)
def test_what_only_a_running_shell_knows_is_unknown(text: str, shown: str, variable: str) -> None:
    (invocation,) = [i for i in follow(text + "\n").invocations if i.words[0].known == "run"]
    (word,) = invocation.words[1:]
    assert word.known is None
    assert word.text == shown
    assert word.unknowns[0].variable == variable


def test_an_unknown_condition_keeps_what_both_ways_agree_on() -> None:
    text = "if lspci | grep -q AMD; then A=1; B=2; ARGS=(x y); else A=3; B=2; ARGS=(x); fi; run $A $B ${ARGS[@]}\n"
    (invocation,) = [i for i in follow(text).invocations if i.words[0].known == "run"]
    first, second, third, rest = invocation.words[1:]
    assert "is 1 or 3" in first.unknowns[0].reason
    assert (second.known, third.known) == ("2", "x")
    assert rest.unknowns[0].several


@pytest.mark.parametrize(
    "text",
    [
        'if [ -z "${BASE:-}" ]; then echo no; exit 1; fi; run ok',
        '[ -n "$HOSTS" ] || { echo no; exit 2; }; run ok',
        "[ $# -lt 1 ] && exit 1; run ok",
        'if [ "$#" -ne 2 ]; then exit 1; fi; run ok',
        "if ! test -f data; then exit 1; fi; run ok",
        "command -v nvidia-smi >/dev/null || exit 1; run ok",
        'case "${MODE:-}" in "") exit 1;; esac; run ok',
    ],
)
def test_a_check_that_gives_up_is_taken_as_passed(text: str) -> None:
    assert words_of(follow(text + "\n")) == [["ok"]]


def test_a_script_within_a_script_sees_exported_variables_only() -> None:
    marker = re.compile("run")
    text = "A=1; export B=2; bash -c 'run \"$A\" $B'; bash <<'EOF'\nrun $B\nEOF\nssh host \"run $A\"\n"
    words = words_of(follow(text, marker=marker))
    assert words == [["$A", "2"], ["2"], ["1"]]


def test_every_file_that_is_there_is_sourced_and_too_many_are_refused_instead_of_called_absent() -> None:
    def script_of(number: int) -> Script:
        lines = "".join(f"source ./s{i}.sh\n" for i in range(number))
        return follow(f"{lines}run $A{number - 1}\n", load=lambda path: f"A{path[3:-3]}=here\n")

    assert words_of(script_of(40)) == [["here"]]
    assert script_of(40).missing == []
    with pytest.raises(ShellError, match="more than 256 files are sourced"):
        script_of(257)


def test_exports_of_a_here_string_that_is_sourced_count() -> None:
    script = follow("source /dev/stdin <<< $'export A=1\\nexport B=\"x y\"'\nC=3 run\n")
    (invocation,) = [i for i in script.invocations if i.words[0].known == "run"]
    assert {name: value.known for name, value in invocation.environment.items()} == {"A": "1", "B": "x y", "C": "3"}


def test_lines_are_those_of_the_script() -> None:
    text = "A=(\n  --x\n  1 # one\n)\n\nrun \\\n  ${A[@]} \\\n  --y\n"
    (invocation,) = follow(text).invocations
    assert [(word.text, word.line) for word in invocation.words] == [("run", 6), ("--x", 2), ("1", 3), ("--y", 8)]


HOSTILE = {
    "recursive variable": "A='$A$A'; eval \"run $A\"",
    "doubling": "A=xxxxxxxxxxxxxxxx\n" + "A=$A$A\n" * 40 + "run $A",
    "doubling array": "A=(1 2 3 4)\n" + "A+=(${A[@]} ${A[@]})\n" * 40 + "run ${A[@]}",
    "arithmetic cycle": "A=B; B=A; run $((A + 1))",
    "endless recursion": "f() { f; f; }; f; run",
    "eval of itself": 'E=\'eval "$E"; eval "$E"\'; eval "$E"; run',
    "endless loop": "i=0; while true; do i=$((i+1)); done; run",
    "nested loops": "".join(f"for a{n} in 1 2 3 4 5 6 7 8 9; do " for n in range(12)) + "run; " + "done; " * 12,
    "unknown conditions": "".join(f"if c{n}; then A{n}=1; fi\n" for n in range(200)) + "run",
    "unknown conditions within each other": "".join(f"if c{n}; then x{n}; else " for n in range(38))
    + "run; "
    + "fi; " * 38,
    "deep substitutions": "run " + "$(echo " * 60 + "x" + ")" * 60,
    "deep braces": "run " + "${A:-" * 60 + "x" + "}" * 60,
    "deep groups": "(" * 3000 + "run" + ")" * 3000,
    "deep arithmetic": "run $((" + "(" * 3000 + "1" + ")" * 3000 + "))",
    "huge power": "run $((9**9**9**9))",
    "huge shift": "run $((1 << 100000000))",
    "huge number": f"run $(({'9' * 5000}))",
    "huge seq": "run $(seq 1 1000000000)",
    "pattern bomb": f"A={'a' * 4000}; run ${{A%%{'*a' * 40}b}}",
    "test pattern bomb": f"A={'a' * 4000}; if [[ $A == {'*a' * 40}b ]]; then run; fi; run",
    "many words": "run " + "x " * 200_000,
    "many commands": "x\n" * 100_000 + "run",
    "indirection": "A=A; run ${!A}",
    "unclosed": 'run "' + "x" * 100_000,
    "backquotes": "run " + "`" * 1001,
    "here-documents": "run <<A <<B\n" + "x\n" * 1000,
    "no end": "run $(cat <<EOF\n)",
    "quotes in braces": "run ${A:-\"}\"} ${B:-'}'}",
    "null": "run \0",
    "huge": "run " + "y" * (1 << 21),
    "dollars": "run " + "$" * 5000,
    "parentheses": "run $((((((((1))))))))",
}


def outcome(text: str) -> ShellError | None:
    """The documented error, None where the script was followed to its end with values as words."""
    try:
        script = follow(text, marker=re.compile("run|vllm"))
    except ShellError as error:
        return error
    assert all(isinstance(word, Value) for invocation in script.invocations for word in invocation.words)
    return None


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_scripts_are_bounded(text: str) -> None:
    begun = time.process_time()
    refusal = outcome(text)
    assert refusal is None or (refusal.line >= 1 and str(refusal))
    assert time.process_time() - begun < 20


FRAGMENTS = st.sampled_from(
    [
        *("if", "then", "else", "fi", "for", "in", "do", "done", "while", "case", "esac", "function", "select", "time"),
        *(
            "[[",
            "]]",
            "[",
            "]",
            "{",
            "}",
            "(",
            ")",
            "((",
            "))",
            "$(",
            "${",
            "$((",
            "`",
            "'",
            '"',
            "\\",
            "\n",
            ";",
            ";;",
        ),
        *("&&", "||", "|", "&", ">", "<", "<<", "<<EOF", "EOF", "<<<", "2>&1", "!", "=", "+=", "A=(", "A+=(", "A=1"),
        *("export", "local", "declare -A", "source x", "eval", "read -ra A", "printf -v A", "set --", "shift", "exit"),
        *(
            "$A",
            "${A[@]}",
            "${A:-b}",
            "${A%%*}",
            "${A//x/y}",
            "${!A}",
            "${#A[@]}",
            "$1",
            "$@",
            "$#",
            "#",
            "*",
            "~",
            "é",
        ),
        *("torchrun pretrain_gpt.py", "--tp", "8", "vllm serve", "ray job submit --", "python3 train.py --colocate"),
    ]
)


@given(st.lists(FRAGMENTS, max_size=40), st.sampled_from(["", " "]))
@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_random_scripts_give_commands_or_the_error(fragments: list[str], between: str) -> None:
    text = between.join(fragments)
    refusal = outcome(text)
    assert refusal is None or 1 <= refusal.line <= text.count("\n") + 2
