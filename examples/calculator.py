"""GRPO in several turns, with a tool:  python examples/calculator.py MODEL PROMPTS [STEPS]

The model writes, a calculator reads the arithmetic in it and answers, and the model goes on. Only what the model wrote
is trained on. A reward looks at the answers: how many there are, and whether the right one is among them.
"""

import ast
import operator
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from rollstream import ActorUpdate, Advantage, Graph, Prompts, Reward, Rollout, Weights, reward, run
from rollstream.stages.rollout import Prompt, Trajectory, TurnEngine

OPERATORS: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
}  # fmt: skip
#: Longer ones are not read, so that no expression takes long.
MAX_CHARACTERS = 40


def calculate(text: str) -> str:
    """The value of the longest piece of arithmetic in a text, as a number or a fraction; "?" where there is none.

    >>> calculate("so (12+3)*2"), calculate("1/3"), calculate("no"), calculate("9**9"), calculate("1/0")
    ('30', '1/3', '?', '?', '?')
    """
    pieces = re.findall(r"[-+*/(). ]*[0-9][-+*/(). 0-9]*", text, re.ASCII)
    longest = max(pieces, key=len, default="").strip()
    if not 0 < len(longest) <= MAX_CHARACTERS:
        return "?"
    try:
        return str(value(ast.parse(longest, mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return "?"


def value(node: ast.expr) -> Fraction:
    """Of a tree of numbers, signs and + - * /; raises ValueError for all else."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return Fraction(str(number))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(left), value(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](value(operand))
        case _:
            raise ValueError(f"not arithmetic: {ast.dump(node)}")


async def reckon(engine: TurnEngine, prompt: Prompt, tools: dict[str, Callable[..., Any]]) -> Trajectory:
    trajectory = Trajectory(prompt)
    while not trajectory.done:
        text = await engine.turn(trajectory)
        engine.say(trajectory, f" -> {await tools['calculator'](text)}\n")
    return trajectory


@reward
def calculated(response: str, target: str) -> float:
    """Half for the share of turns that the calculator could answer, half for the right answer."""
    answers = re.findall(r" -> (\S+)\n", response)
    answered = [a for a in answers if a != "?"]
    return 0.5 * len(answered) / max(len(answers), 1) + 0.5 * (str(target) in answered)


def graph(model: str, prompts: str, *, lr: float = 2e-5) -> Graph:
    rollouts = Rollout(
        Rollout.Config(
            model=model,
            n=8,
            max_tokens=48,
            function=reckon,
            tools={"calculator": calculate},
            max_turns=3,
            max_turn_tokens=4,
        )
    )(Prompts(Prompts.Config(path=prompts, model=model, prompt="question", answer="answer")))
    scored = Reward(Reward.Config(function=calculated))(rollouts)
    update = ActorUpdate(ActorUpdate.Config(model=model, groups_per_step=8, lr=lr))(Advantage()(scored))
    return Graph("calculator", output=update, weights=Weights(update, to=rollouts))


if __name__ == "__main__":
    model, prompts, *steps = sys.argv[1:]
    for step in run(graph(model, prompts), steps=int(steps[0]) if steps else 20):
        print(step.index, step.metrics["reward/mean"])
