"""Games of the package TextArena, against the package itself."""

from __future__ import annotations

import json
import random
from importlib.util import find_spec

import pytest
from environments.played import play_all, pool_of

from burnish.environments.textarena import TextArena
from burnish.errors import MissingError, UsageError

INSTALLED = find_spec("textarena") is not None
needs_package = pytest.mark.skipif(
    not INSTALLED, reason="make nightly-environments installs textarena"
)
pytestmark = [pytest.mark.nightly, pytest.mark.filterwarnings("ignore")]  # of the package's own
WORDS = ["crane", "slate", "pilot"]


@pytest.fixture(scope="module", autouse=True)
def _nltk_data(tmp_path_factory):
    """Words and a tagger as NLTK keeps them, which the package would download."""
    if not INSTALLED:
        yield
        return
    import nltk

    folder = tmp_path_factory.mktemp("nltk")
    words = folder / "corpora" / "words"
    tagger = folder / "taggers" / "averaged_perceptron_tagger_eng"
    for each in (words, tagger):
        each.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("".join(f"{word}\n" for word in WORDS))
    files = {"weights": {}, "tagdict": dict.fromkeys([*WORDS, "test"], "NN"), "classes": ["NN"]}
    for name, value in files.items():
        (tagger / f"averaged_perceptron_tagger_eng.{name}.json").write_text(json.dumps(value))
    nltk.data.path.insert(0, str(folder))
    yield
    nltk.data.path.remove(str(folder))


@needs_package
@pytest.mark.parametrize(
    ("name", "moves"),
    [
        ("Wordle-v0", ["crane", "[slate]", "I say [pilot]"]),
        ("Wordle-v0", ["[cranes]", "[xxxxx]"]),
        ("GuessTheNumber-v0", ["[5]", "[11]", "[7]"]),
        ("TowerOfHanoi-v0", ["[A C]", "[A B]", "[A A]", "[A A]"]),
    ],
)
def test_a_game_for_one_is_the_packages(name, moves):
    import textarena

    theirs = textarena.make(name)
    theirs.reset(num_players=1, seed=3)
    (row,) = TextArena.rows(name, size=1, seed=3)
    with pool_of(textarena=name) as pool:
        (played,) = play_all(pool, [row], [moves])
    # The package's text grows, with the player's moves in it.
    whole = theirs.get_observation()[1]
    assert row["prompt"] == [{"role": "user", "content": whole.strip()}]
    done = False
    for move, turn in zip(moves, played.turns, strict=False):
        done, _ = theirs.step(move)
        text = theirs.get_observation()[1]
        assert text.startswith(whole)
        heard = turn.messages[0]["content"]
        assert text.removeprefix(whole).strip().endswith(heard)
        whole = text
        assert turn.done == done
    rewards, _ = theirs.close()
    assert played.rewards == ({"game": rewards[0]} if done else {})


@needs_package
@pytest.mark.parametrize("player", [0, 1])
def test_a_game_for_two_has_an_opponent(player):
    kwargs = {"player": player}
    rows = list(TextArena.rows("TicTacToe-v0", size=4, seed=1, **kwargs))
    moves = [f"[{cell}]" for cell in (4, 0, 8, 2, 6, 1, 3, 5, 7)]
    with pool_of(textarena="TicTacToe-v0", kwargs=kwargs) as pool:
        first = play_all(pool, rows, [moves] * 4)
        assert first == play_all(pool, rows, [moves] * 4)
    assert all(f"You are Player {player} " in row["prompt"][0]["content"] for row in rows)
    assert {game.rewards.get("game") for game in first} <= {-1.0, 0.0, 1.0}
    assert all(
        f"Player {1 - player} placed" in " ".join([row["prompt"][0]["content"], *game.texts])
        for row, game in zip(rows, first, strict=True)
    )


@needs_package
def test_games_do_not_draw_from_each_other():
    random.seed(9)
    before = random.getstate()
    rows = list(TextArena.rows("GuessTheNumber-v0", size=2))
    assert random.getstate() == before
    with pool_of(textarena="GuessTheNumber-v0") as pool:
        moves = ["[3]", "[15]", "[9]"]
        together = play_all(pool, rows, [moves, moves])
        alone = [play_all(pool, [row], [moves])[0] for row in rows]
    assert together == alone


@needs_package
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("Wordl-v0", {}),
        ("TicTacToe-v0", {"players": 3}),
        ("TicTacToe-v0", {"player": 2}),
        ("TicTacToe-v0", {"board": 4}),
    ],
)
def test_what_the_package_does_not_have_is_refused(name, kwargs):
    with pytest.raises(UsageError):
        TextArena.schemas(name, **kwargs)


@pytest.mark.skipif(INSTALLED, reason="it is installed")
def test_without_the_package_it_is_named():
    with pytest.raises(MissingError, match="textarena"):
        TextArena.schemas("Wordle-v0")
