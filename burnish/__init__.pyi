from burnish.api import Result as Result
from burnish.api import evaluate as evaluate
from burnish.api import load_config as load_config
from burnish.api import rl as rl
from burnish.api import run as run
from burnish.api import sft as sft
from burnish.config.section import Section as Section
from burnish.engines.base import Engine as Engine
from burnish.environments.base import Action as Action
from burnish.environments.base import Environment as Environment
from burnish.environments.base import EnvironmentFailure as EnvironmentFailure
from burnish.environments.base import Observation as Observation
from burnish.environments.base import ToolCall as ToolCall
from burnish.errors import BurnishError as BurnishError
from burnish.method import Method as Method
from burnish.methods.offline import OfflineMethod as OfflineMethod
from burnish.methods.rl import RL as RL
from burnish.rollout.base import Generator as Generator
from burnish.tracking.trackers import Tracker as Tracker

__version__: str
