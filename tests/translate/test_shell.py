"""Scripts that are read here and run by bash start the same programs with the same words."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.nightly import draws

from burnish.errors import UsageError
from burnish.translate.shell import read_script
from burnish.translate.translation import translate_arguments

ENVIRON = {"PATH": "/usr/bin:/bin", "HOME": "/home/someone", "SIZE": "4"}
RECORDER = 'python3() { [ $# = 0 ] || printf "%s\\x1f" "$@"; printf "\\x1e"; }\n'
"""Replaces the program by a function that prints its words."""


def by_bash(script: str, words: tuple[str, ...] = ()) -> list[list[str]]:
    argv = ["bash", "-c", RECORDER + script, "run.sh", *words]
    done = subprocess.run(argv, env=ENVIRON, capture_output=True, cwd="/", timeout=30, check=False)
    started = done.stdout.decode().split("\x1e")[:-1]
    return [each.split("\x1f")[:-1] for each in started]


def by_reading(script: str, words: tuple[str, ...] = ()) -> list[list[str]]:
    found = read_script("run.sh", script, words, ENVIRON)
    known = found.variables.known
    started = [each.words for each in found.commands if each.words[0] == "python3"]
    return [[known(word) for word in words[1:]] for words in started]


SCRIPTS = [
    'N=${N:-8}; python3 n=$N "m=${M:-a b}" $EMPTY "k=${K-}" ${J:+j} ${SIZE:+s=$SIZE}',
    ': ${A:=3}; : "${B:=$A$A}"; python3 $A $B ${A:-9} ${C:-${D:-${HOME}/x}}',
    "a=$((1024 * 2)); b=$(( (a + 3) / 4 % 5 )); python3 $a $b $((a > b ? a : -b)) $((2**10 - 07 + 0x1f))",
    "x=3; ((x += 2)); let x*=2; python3 $x $((x++)) $x $((--x)) $(( x == 10 && !0 )) $((-7 / 2)) $((-7 % 3))",
    "p=${q:-$(((3 + 4) * 2))}; python3 $p",
    'L=(a \'b c\' d=$SIZE); L+=(e "f g"); python3 "${L[@]}" ${#L[@]} ${L[1]} "${L[*]}" ${L[-1]}',
    'E=(); python3 a "${E[@]}" ${E[@]+"${E[@]}"} b "" "$@" c',
    'L=(x y z); L[1]=w; python3 "${L[@]:1}" "${L[@]/x/q}" "p${L[@]}s"',
    "declare -A M=([a]=1 [b]='2 3'); M[c]=4; python3 ${M[a]} \"${M[b]}\" ${M[c]} ${#M[@]}",
    'if [ "$SIZE" = 4 ] && { [ 1 -gt 2 ] || [[ $SIZE == [3-5]* ]]; }; then python3 yes; else python3 no; fi',
    'if [ -z "$NO" -a 1 -eq 1 ]; then python3 a; elif true; then python3 b; fi; [[ -n $NO ]] || python3 c',
    "case $SIZE in 1|2) python3 few;; [3-9]) python3 some;; *) python3 many;; esac",
    "case a.b in *.c) python3 c;; a*) python3 a;;& *b) python3 b;; esac",
    "for x in 1 'a b' {3..5} {c,d}e; do [ $x = 4 ] && continue; python3 \"$x\"; done 2>/dev/null",
    "i=0; while [ $i -lt 10 ]; do i=$((i+1)); if (( i % 2 )); then continue; fi; [ $i = 8 ] && break; python3 $i; done",
    "for ((i = 1; i <= 3; i++)); do python3 $i; done; until false; do break; done; python3 $i",
    'f() { local a=$1; shift; python3 "$a" "$@" $#; return 3; }; f x \'y z\' || python3 failed',
    'now() { echo \'a  b\'; }; python3 $(now) "$(now)" "$(echo -n x; echo y)" `echo z`',
    "python3 $(basename /a/b.sh .sh) $(dirname /a/b/c) $(basename a/) $(dirname x)",
    "cd /tmp && python3 $(pwd); (cd /usr; python3 $(pwd)); python3 $(pwd)",
    "N=a/b.c.d; python3 ${N##*/} ${N%.*} ${N%%.*} ${N#*.} ${N/b/x} ${N//./-} ${N^^} ${N:2:3} ${#N} ${N: -1}",
    'V=SIZE; python3 ${!V}; export A=1 B="x y"; readonly C=2; python3 "$A$B$C"; unset A; python3 ${A-gone}',
    "read -r -d '' WORDS <<EOF\nm.py \\\n  --a $SIZE \\\n  --b \"x y\" \\$HOME\nEOF\npython3 -m $WORDS\n",
    "read -r -d '' W <<'EOF' || true\n a $SIZE\n b\nEOF\npython3 $W",
    'read A B <<< \'1 2 3\'; read -r C <<-EOF\n\tx y\n\tz\n\tEOF\npython3 "$A" "$B" "$C"',
    'set -- a \'b c\'; shift; python3 "$1" $# "$@"; set -e; python3 x; false; python3 never',
    "python3 a=\"b 'c'\" 'd \"e\"' f\\ g h\\\"i \"\\$J \\\\ \\n\" $'k\\tl' x=['a','b'] y={a:1,b:2}",
    "python3 a=1 \\\n  b=2 `# a remark` \\\n  c=3  # the end\n",
    "X='a,'\\\n'b,'\\\n'c'; python3 $X -$X/$SIZE-$SIZE/$X",
    "cat <<EOF >/dev/null\npython3 not $SIZE\nEOF\npython3 yes <<'END'\nfoo\nEND\n",
    'python3 ~/x ~ a=~/y --b=~/z "~/q"; Y=~/w; python3 $Y',
    "true && python3 a || python3 b; false && python3 c || python3 d; ! true || python3 e; ! false && python3 f",
    "C='python3 -m x'; $C \"a b\"; eval \"python3 'p q' $SIZE\"; A=b python3 y",
    "x=5; (x=6; python3 $x); { x=7; }; python3 $x; echo q | x=8; python3 $x",
    "[ $# -lt 2 ] && python3 few; while [ $# -gt 0 ]; do case $1 in --a) python3 a=$2; shift 2;; *) shift;; esac; done",
    "trap 'echo x' EXIT; set -euo pipefail; mkdir -p /tmp >/dev/null; exit 3; python3 never",
    "python3 $((SIZE * 2)) ${SIZE}x \"${SIZE}\"'$SIZE' ${NONE:-[1]} ${NONE:-\"['a','b']\"} \"${NONE:-['a',\"b\"]}\"",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("words", [(), ("--a", "1 2", "x")])
def test_a_script_is_read_as_bash_runs_it(script: str, words: tuple[str, ...]) -> None:
    assert by_reading(script, words) == by_bash(script, words)


NAMES = st.sampled_from(["A", "B", "C", "SIZE"])
PLAIN = st.sampled_from(["a", "1", "x.y", "'b c'", '"d  e"', "", "7", "-1", "a/b"])


@st.composite
def words_of_scripts(draw: st.DrawFn, depth: int = 2) -> str:
    kind = draw(st.integers(0, 8 if depth else 1))
    if kind < 2:
        return draw(PLAIN)
    name = draw(NAMES)
    inner = draw(words_of_scripts(depth - 1))
    if kind < 5:
        sign = draw(st.sampled_from([":-", "-", ":=", "=", ":+", "+"]))
        return f"${{{name}{sign}{inner}}}"
    if kind == 5:
        return f"$(({draw(st.integers(0, 9))} {draw(st.sampled_from(['+', '*', '-', '<', '&&']))} 0{name[:0]}3))"
    if kind == 6:
        return (
            f"${{{name}{draw(st.sampled_from(['##a', '%b', '//a/z', ',,', '^', ':1', '/x/y']))}}}"
        )
    if kind == 7:
        return inner + draw(words_of_scripts(depth - 1))
    return f'"{draw(st.sampled_from(["", "k="]))}${name}"'


@st.composite
def scripts(draw: st.DrawFn, depth: int = 2) -> str:
    lines = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.integers(0, 6 if depth else 2))
        word = draw(words_of_scripts())
        name = draw(NAMES)
        if kind == 0:
            lines.append(f"{name}={word}")
        elif kind == 1:
            lines.append(f"L+=({word} {draw(words_of_scripts())})")
        elif kind == 2:
            lines.append(f'python3 {word} "${{L[@]}}" ${name}')
        elif kind == 3:
            condition = draw(
                st.sampled_from([f'[ "${name}" = 1 ]', f"[[ ${name} == a* ]]", f'[ -z "${name}" ]'])
            )
            lines.append(
                f"if {condition}; then {draw(scripts(depth - 1))}\nelse {draw(scripts(depth - 1))}\nfi"
            )
        elif kind == 4:
            lines.append(
                f'case "${name}" in 1) {draw(scripts(depth - 1))};; a*|"") python3 c;; *) python3 d;; esac'
            )
        elif kind == 5:
            lines.append(f"for {name} in {word} 2; do {draw(scripts(depth - 1))}\ndone")
        else:
            lines.append(f"f() {{ {draw(scripts(depth - 1))}\n}}; f {word}")
    return "\n".join([*lines, f'python3 "${name}" "${{L[@]}}"'])


@given(scripts())
@draws(400, day=25)
def test_scripts_of_all_kinds_are_read_as_bash_runs_them(script: str) -> None:
    assert by_reading(script) == by_bash(script)


def test_a_branch_that_only_a_run_decides_gives_no_setting() -> None:
    script = (
        'D=$(some-tool); N=8; X=(a=1); if [ "$D" = npu ]; then N=16; X+=(b=2); fi\n'
        'python3 -m verl.trainer.main_ppo seed=$SIZE data.train_batch_size=$N rollout.n=4 "${X[@]}"'
    )
    found = read_script("run.sh", script, (), ENVIRON)
    command = found.commands[-1]
    undecided = [word.partition("=")[0] for word in command.words if found.variables.marks_in(word)]
    assert (undecided, command.doubt) == (["data.train_batch_size", "b"], "")


def test_a_branch_that_ends_the_script_is_not_taken() -> None:
    script = "if [ ! -f data ]; then exit 1; fi; N=2; if tool; then N=3; else exit; fi; python3 $N"
    assert by_reading(script)[-1] == ["3"]


@pytest.mark.parametrize(
    "script",
    [
        "while true; do :; done",
        "f() { f; }; f",
        "A=a; for i in {1..40}; do A=$A$A; done",
        "python3 $((1 / 0))",
        "python3 $((A))",
        "if x; then",
        "case $(tool) in a) python3 b;; esac",
        "A=$(tool); for x in a; do [[ $A =~ b ]] && break; done; cd $((1 +))",
        'python3 "a',
        "declare -a A=([3]=x)",
    ],
)
def test_what_cannot_be_read_is_refused_with_the_script(script: str) -> None:
    with pytest.raises(UsageError) as raised:
        read_script("run.sh", "A=A\n" + script, (), ENVIRON)
    assert "run.sh" in str(raised.value)


def translated(tmp_path: Path, script: str, *words: str) -> str:
    path = tmp_path / "run.sh"
    path.write_text(script)
    return translate_arguments([str(path), *words])


def test_what_nothing_sets_is_named_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=$MODEL_X data.seed=1 $NONE"
    )
    text = translated(tmp_path, script)
    assert "#   actor_rollout_ref.model.path=$MODEL_X: MODEL_X is set neither" in text
    assert not [line for line in text.splitlines() if "$" in line and line[:1] != "#"]
    monkeypatch.setenv("MODEL_X", "some/model")
    text = translated(tmp_path, script)
    assert "model: {path: some/model}" in text
    assert "environment: MODEL_X" in text


def test_a_script_gets_its_own_words(tmp_path: Path) -> None:
    script = 'if [ $# -lt 1 ]; then echo usage; exit 1; fi; trl sft --seed $1 "${@:2}"'
    assert "seed: 5" in translated(tmp_path, script, "5", "--max_steps", "7")
    assert "steps: 7" in translated(tmp_path, script, "5", "--max_steps", "7")
    with pytest.raises(UsageError, match="line 1"):
        translated(tmp_path, script)


def test_the_words_of_a_launcher_are_no_settings(tmp_path: Path) -> None:
    script = (
        "ray job submit --address=x --runtime-env=y -- uv run --extra vllm python3 -u -m verl.trainer.main_ppo "
        "actor_rollout_ref.rollout.n=4 2>&1 | tee log &\nwait\npython3 -m verl.model_merger merge --backend fsdp"
    )
    text = translated(tmp_path, script)
    assert text.rstrip().endswith(
        "# 1 setting: 1 carried, 0 as by default, 0 have no counterpart, 0 left for you to decide, 0 lost"
    )


@pytest.mark.parametrize(
    "script",
    [
        "echo hello",
        "if tool; then trl sft --seed 1; else trl sft --seed 2; fi",
        "trl sft --seed 1\ntrl grpo --seed 2 --num_generations 4",
        'X=(seed=1); if tool; then X=("$(other)"); fi; python3 -m verl.trainer.main_ppo "${X[@]}"',
    ],
)
def test_a_script_without_one_program_is_refused(tmp_path: Path, script: str) -> None:
    with pytest.raises(UsageError):
        translated(tmp_path, script)


@pytest.mark.parametrize("name", ["train.py", "notes.md", "model.bin"])
def test_a_file_of_another_kind_is_named_as_such(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("trainer = GRPOTrainer(seed=1)")
    with pytest.raises(UsageError, match=name):
        translate_arguments([str(tmp_path / name)])


def test_nothing_is_run(tmp_path: Path) -> None:
    script = f"touch {tmp_path}/made; echo x > {tmp_path}/made; A=$(touch {tmp_path}/made); trl sft --seed 1"
    translated(tmp_path, script)
    assert os.listdir(tmp_path) == ["run.sh"]
