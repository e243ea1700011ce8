"""Games of the package TextArena, for one player or against an opponent."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from burnish.environments.base import Action, Environment, EnvironmentFailure, Message, Observation
from burnish.environments.process_random import ProcessRandom
from burnish.errors import MissingError, UsageError
from burnish.functions import did_you_mean, failure, load_function

_MOST_PLAYERS = 15
_SEED = "game_seed"
"""The column of rows that are games; their prompt is what the game says first."""


class TextArena(Environment):
    """A game. The model hears what is new since its last move, and is rewarded as the game says at its end."""

    def __init__(
        self,
        textarena: str,
        size: int = 500,
        seed: int = 0,
        player: int | None = None,
        players: int | None = None,
        opponent: str = "random",
        **settings: Any,
    ) -> None:
        """Take the game's own settings.

        `player` is the model's number; without it, games take turns. `players` is needed for a game that allows several numbers.
        `opponent` is file.py:Name of what returns a move for a text, as TextArena's agents do, or random: one of the moves that
        the game lists.
        """
        self._arguments = textarena, json.dumps(settings, sort_keys=True)
        self._player = player
        self._players = players
        self._opponent = _opponent(opponent)
        self._game: Any = None
        self._me = 0
        self._heard: dict[int, str] = {}
        self._random = ProcessRandom(0)

    @classmethod
    def rows(
        cls, textarena: str = "", size: int = 500, seed: int = 0, **arguments: Any
    ) -> Iterator[Mapping[str, Any]]:
        """Yield games. A row has what the game says first, and the seed that makes it say so."""
        environment = cls(textarena, **arguments)
        for number in range(seed, seed + size):
            (opening,) = environment.begin({}, number)
            yield {"prompt": [opening], _SEED: number, "data_source": textarena}
        environment.close()

    @classmethod
    def schemas(cls, textarena: str = "", **arguments: Any) -> Sequence[Mapping[str, Any]]:
        """Return no tools: moves are texts. Raises `UsageError` for a game that cannot be played."""
        environment = cls(textarena, **arguments)
        environment.begin({}, 0)
        environment.close()
        return ()

    def begin(self, row: Mapping[str, Any], seed: int) -> Sequence[Message]:
        """See `Environment.begin`."""
        is_ours = _SEED in row
        seed = int(row[_SEED]) if is_ours else seed
        free = _free_games(*self._arguments)
        self._random = ProcessRandom(seed)
        with self._random:
            self._game = free.pop() if free else _made(*self._arguments)
            players = _reset(self._game, self._players, seed % 2**32)
            self._me = seed % players if self._player is None else self._player
            if not 0 <= self._me < players:
                raise UsageError(
                    "rollout.environment.kwargs.player is not in the game",
                    have=f"{self._me}",
                    want=f"a number from 0 to {players - 1}",
                    do="correct it",
                )
            self._let_others_move()
        opening = {"role": "user", "content": self._new_text()}
        return () if is_ours else [opening]

    def step(self, action: Action) -> Observation:
        """Make a move."""
        with self._random:
            done, _ = self._game.step(action.content)
            if not done:
                done = self._let_others_move()
        return Observation([{"role": "user", "content": self._new_text()}], done=done)

    def score(self) -> Mapping[str, float]:
        """Return the model's reward; none if a limit has ended the game."""
        rewards, _ = _core(self._game).close()
        return {} if rewards is None else {"game": float(rewards[self._me])}

    def close(self) -> None:
        """Let another conversation use the game's word lists, which take seconds to read."""
        if self._game is not None:
            _free_games(*self._arguments).append(self._game)
            self._game = None

    def _let_others_move(self) -> bool:
        """Let the opponent move until it is the model's turn; return whether the game has ended."""
        done = False
        while not done and self._state.current_player_id != self._me:
            other = self._state.current_player_id
            self._hear(other)
            try:
                move = str(self._opponent(self._heard[other]))
            except Exception as error:
                raise EnvironmentFailure(f"the opponent failed: {failure(error)}") from error
            done, _ = self._game.step(move)
        return done

    @property
    def _state(self) -> Any:
        return _core(self._game).state

    def _hear(self, player: int) -> str:
        """Take in what is new for a player, and return it."""
        new = self._state.observations[player]
        self._state.observations[player] = []
        names = self._state.role_mapping
        lines = [
            (sender, f"\n[{names.get(sender, f'Player {sender}')}] {text}")
            for sender, text, _ in new
        ]
        self._heard[player] = self._heard.get(player, "") + "".join(line for _, line in lines)
        return "".join(line for sender, line in lines if sender != player)

    def _new_text(self) -> str:
        return self._hear(self._me).strip()


def _opponent(name: str) -> Callable[[str], Any]:
    if name == "random":
        return _random_move
    found = load_function(name, "rollout.environment.kwargs.opponent")
    return found() if isinstance(found, type) else found


def _random_move(text: str) -> str:
    """Return one of the moves in quotes that the game has listed last."""
    import random

    lines = [line for line in text.splitlines() if re.search(r"'\[[^\]]+\]'", line)]
    if not lines:
        raise ValueError("the game lists no moves; set rollout.environment.kwargs.opponent")
    return random.choice(re.findall(r"'(\[[^\]]+\])'", lines[-1]))


def _core(game: Any) -> Any:
    """Return a game without wrappers, which repeat all that was said."""
    from textarena import Wrapper

    while isinstance(game, Wrapper):
        game = game.env
    return game


def _reset(game: Any, players: int | None, seed: int) -> int:
    """Begin a game, and return its number of players: the least that it allows, if not given."""
    for number in [players] if players else range(1, _MOST_PLAYERS + 1):
        try:
            game.reset(num_players=number, seed=seed)
        except AssertionError:
            continue
        return number
    raise UsageError(
        "the game does not allow this number of players",
        have=f"rollout.environment.kwargs.players: {players}",
        do="set rollout.environment.kwargs.players to a number that the game allows",
    )


@lru_cache
def _free_games(name: str, settings: str) -> list[Any]:
    """Return the games of ended conversations."""
    return []


def _made(name: str, settings: str) -> Any:
    """Make a game. Raises `UsageError` for an unknown one, or settings that it refuses."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise MissingError(
            "TextArena cannot be imported",
            have=failure(error),
            do="pip install textarena",
        ) from error
    if name not in ENV_REGISTRY:
        raise UsageError(
            f"TextArena has no game {name}",
            want=f"one of its {len(ENV_REGISTRY)} names",
            do=did_you_mean(name, ENV_REGISTRY) or "see textarena.envs.registration.ENV_REGISTRY",
        )
    try:
        return textarena.make(name, **json.loads(settings))
    except LookupError as error:
        raise MissingError(
            f"TextArena's {name} needs data of NLTK",
            have=failure(error),
            do="python -m nltk.downloader words averaged_perceptron_tagger_eng",
        ) from error
    except Exception as error:
        raise UsageError(
            f"TextArena's {name} cannot be made",
            have=failure(error),
            do="correct rollout.environment.kwargs",
        ) from error
