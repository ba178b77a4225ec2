"""A bench from its beginning to its end."""

import asyncio
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from tlt_client import AsyncClient
from tlt_client.errors import TltClientError

from tlt_server import results
from tlt_server.bench.measure import Measured, measure
from tlt_server.bench.plan import Plan
from tlt_server.bench.report import figures_of, recommendation, table
from tlt_server.errors import ServerFailed
from tlt_server.keys import Keys


def run(plan: Plan, keys: Keys, console: Console, argv: list[str], kept: Path | None, *, arms: bool) -> None:
    """Prints a table and a recommendation, and keeps the figures. Of one that is broken off, what there is.

    Raises ConfigError, ServerFailed: the server cannot be measured, or failed meanwhile.
    Raises KeyboardInterrupt: it was broken off.
    """
    found = Measured()
    if kept:
        results.require_place(kept)
    try:
        asyncio.run(_measure(plan, keys, console, found, arms=arms))
    finally:
        if found.visits:
            figures = figures_of(found)
            if (temperature := plan.sampling.temperature) is not None:
                figures["temperature"] = temperature
            console.print(table(found, figures))
            console.print(recommendation(found, figures))
            if kept:
                results.write(results.measured_here("bench", argv, figures), kept)
                console.print(f"figures written to {kept}")


async def _measure(plan: Plan, keys: Keys, console: Console, found: Measured, *, arms: bool) -> None:
    columns = (TextColumn("{task.description:>24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    most = 2 * max(plan.loads)  # an abort for each request in flight
    try:
        async with AsyncClient(plan.url, api_key=keys.api, admin_key=keys.admin, max_concurrency=most) as client:
            with Progress(*columns, console=console) as progress:
                task = progress.add_task("", total=None)

                def tick(side: str, load: int) -> None:
                    total = plan.rounds * len(plan.turns(found.sides))
                    done = sum(map(len, found.visits.values()))
                    progress.update(task, total=total, completed=done, description=f"{side}, {load} in flight")

                await measure(client, plan, found, console.print, tick, arms=arms)
    except TltClientError as error:
        raise ServerFailed(f"{plan.url}: {error}") from error
