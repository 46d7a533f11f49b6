"""Tools as programs describe them to a parser."""

from sglang.srt.managers.io_struct import Function as Function
from sglang.srt.managers.io_struct import Tool as Tool
