"""The fork of SGLang: made from the pristine wheel and patches/, installed, and recognised again.

build.build_fork()     pristine wheel + series -> sglang-0.5.17+tlt.<hash>
install.install()      that wheel -> an environment
status.check()         an environment -> what it holds; status.require_fork() refuses all but the fork
refresh.refresh()      after a change of the series: patches/images.sha256 anew
"""
