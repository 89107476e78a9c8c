"""GRPO on sums, in twenty lines:  python examples/arithmetic.py MODEL PROMPTS [STEPS]"""

import sys

from rollstream import ActorUpdate, Advantage, Graph, Prompts, RefLogprob, Reward, Rollout, Weights, reward, run


@reward
def right_number(response: str, target: str) -> float:
    return 1.0 if response.strip() == str(target) else 0.2 * (str(target) in response.split())


def graph(model: str, prompts: str) -> Graph:
    rollouts = Rollout(Rollout.Config(model=model, n=8, max_tokens=12))(
        Prompts(Prompts.Config(path=prompts, model=model, prompt="question", answer="answer"))
    )
    scored = Reward(Reward.Config(function=right_number))(rollouts)  # or function="last_number", "math_verify", ...
    ref = RefLogprob(RefLogprob.Config(model=model))(rollouts)
    actor = ActorUpdate(ActorUpdate.Config(model=model, groups_per_step=8, lr=2e-5, kl_coef=0.01))
    update = actor(Advantage()(scored), ref=ref)
    return Graph("arithmetic", output=update, weights=Weights(update, to=rollouts))


if __name__ == "__main__":
    model, prompts, *steps = sys.argv[1:]
    for step in run(graph(model, prompts), steps=int(steps[0]) if steps else 20):
        print(step.index, step.metrics["reward/mean"])
