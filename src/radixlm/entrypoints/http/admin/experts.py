"""Operator routes that record which experts tokens choose, with the texts of SGLang."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response

from radixlm.entrypoints.http.admin.control import get_and_post_on
from radixlm.entrypoints.http.state import state_of

router = APIRouter(tags=["admin"])


async def _ask(request: Request, verb: str, text: str) -> Response:
    (await state_of(request).intake.control(verb)).result()
    return PlainTextResponse(text)


@get_and_post_on(router, "/start_expert_distribution_record")
async def start_record(request: Request) -> Response:
    """Forget what was recorded, and record what --expert-distribution-recorder-mode says."""
    return await _ask(request, "start_expert_record", "Start recording the expert distribution.\n")


@get_and_post_on(router, "/stop_expert_distribution_record")
async def stop_record(request: Request) -> Response:
    """Stop recording; what was recorded is kept."""
    return await _ask(request, "stop_expert_record", "Stop recording the expert distribution.\n")


@get_and_post_on(router, "/dump_expert_distribution_record")
async def dump_record(request: Request) -> Response:
    """Write what was recorded to a JSON file in RADIXLM_EXPERT_RECORDER_DIR, and forget it."""
    return await _ask(request, "dump_expert_record", "Dump expert distribution record.\n")
