"""near.py ROOT PACKAGE... [--max N]: statements that would fit on one line if they were up to N (30) characters shorter."""
import ast,re,sys
from pathlib import Path
args=[a for a in sys.argv[1:] if not a.startswith("--")]; N=int(sys.argv[sys.argv.index("--max")+1]) if "--max" in sys.argv else 30
args=[a for a in args if not a.isdigit()]
root=Path(args[0])
def joined(lines):
    s=" ".join(l.strip() for l in lines)
    s=re.sub(r"([(\[{]) ",r"\1",s); s=re.sub(r",? ([)\]}])",r"\1",s); return s
total=0
for pk in args[1:]:
  base=root/pk
  for p in sorted(base.rglob("*.py") if base.is_dir() else [base]):
    s=p.read_text(); L=s.split("\n"); t=ast.parse(s)
    for n in ast.walk(t):
        if isinstance(n,(ast.Assign,ast.AnnAssign,ast.Return,ast.Expr,ast.AugAssign,ast.Raise,ast.Assert)) and n.end_lineno>n.lineno:
            if isinstance(n,ast.Expr) and isinstance(n.value,ast.Constant): continue
            a,b=n.lineno,n.end_lineno
        elif isinstance(n,(ast.If,ast.While,ast.For,ast.With,ast.FunctionDef)):
            a=n.lineno; b=n.body[0].lineno-1
            if isinstance(n,ast.FunctionDef):
                while b>a and not L[b-1].rstrip().endswith(":"): b-=1
            while b>a and (not L[b-1].strip() or L[b-1].strip().startswith("#")): b-=1
            if b<=a: continue
        else: continue
        j=joined(L[a-1:b]); over=len(L[a-1])-len(L[a-1].lstrip())+len(j)-120
        if over<=N: total+=b-a; print(f"{p}:{a} saves {b-a}, {over} too long: {j}")
print(total,"lines")
