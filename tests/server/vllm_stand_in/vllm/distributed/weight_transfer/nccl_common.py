from typing import Any


def trainer_init(init_info: dict[str, Any]) -> Any:
    raise NotImplementedError("the stand-in joins no group yet")
