"""Lines of nanoGPT: ``iter 2000: loss 1.77, time 4560.19ms, mfu 3.21%`` and ``step 2000: train loss …``."""

from __future__ import annotations

import re

from .log import NUMBER, Log, Stateless, count, number

FORMAT = "nanoGPT"
NEEDED = b""
SIGN = rb"(?:iter \d+: loss [-+\d.nai]+, time [\d.]+ms|step \d+: train loss [-+\d.nai]+, val loss )"

_ITER = re.compile(rf"\biter (\d+): loss ({NUMBER}), time ({NUMBER})ms(?:, mfu ({NUMBER})%)?")
_ESTIMATE = re.compile(rf"\bstep (\d+): train loss ({NUMBER}), val loss ({NUMBER})")
_PARAMETERS = re.compile(r"number of parameters: ([\d.,]+)M")
_TOKENS = re.compile(r"tokens per iteration will be: ([\d,]+)")


class Lines(Stateless):
    """Reads them. The model FLOPs utilisation is -100 % in the first iterations: not measured yet, kept as printed."""

    marks = (b"iter ", b": train loss ", b"number of parameters: ", b"tokens per iteration will be")

    def __init__(self, log: Log) -> None:
        self._log = log

    def take(self, line: str) -> bool:
        """Use one line."""
        log = self._log
        if (found := _ITER.search(line)) is not None:
            step = count(found[1])
            if step is None:
                return False
            log.reached(step, FORMAT)
            for name, text, factor, unit in (
                ("loss", found[2], 1.0, ""),
                ("step_time", found[3], 1e-3, "s"),
                ("mfu(%)", found[4], 1.0, "%"),
            ):
                if text and (value := number(text)) is not None:
                    log.scalar(name, step, value * factor, unit=unit)
        elif (found := _ESTIMATE.search(line)) is not None:
            step, train, held_out = count(found[1]), number(found[2]), number(found[3])
            if step is None or train is None or held_out is None:
                return False
            log.scalar("train loss", step, train, unit="nats/token")
            log.scalar("eval_loss", step, held_out)
        elif (found := _PARAMETERS.search(line)) is not None:
            millions = number(found[1])
            if millions is not None and millions < 1e12:
                log.run.manifest({"model": {"parameters": round(millions * 1e6)}})
        elif (found := _TOKENS.search(line)) is not None:
            log.run.manifest({"config": {"tokens_per_iteration": count(found[1])}})
        else:
            return False
        return True
