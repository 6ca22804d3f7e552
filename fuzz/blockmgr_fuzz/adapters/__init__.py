"""Managers behind the fuzzer's protocol: ours, a toy with planted faults, vLLM's and SGLang's.

Nothing is imported here: the last two need what they wrap.

    blockmgr fuzz --target blockmgr_fuzz.adapters.toy:factory
"""
