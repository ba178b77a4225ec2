from vllm import _Absent

StructuredOutputsParams = _Absent
