"""rn.py ROOT < lines `file.py function old=new old=new ...`: rename locals, parameters used by position only, and comprehension variables."""
import ast,sys
from pathlib import Path
root=Path(sys.argv[1])
for line in sys.stdin:
    w=line.split("#")[0].split()
    if not w: continue
    p=root/w[0]; src=p.read_text(); t=ast.parse(src)
    fns=[n for n in ast.walk(t) if isinstance(n,(ast.FunctionDef,ast.AsyncFunctionDef)) and (n.name==w[1] or w[1].isdigit() and n.lineno<=int(w[1])<=n.end_lineno)]
    if w[1].isdigit(): fns=sorted(fns,key=lambda n:n.end_lineno-n.lineno)[:1]
    if not fns: print("no function",w[0],w[1]); continue
    ren=dict(x.split("=") for x in w[2:]); ed=[]
    for fn in fns:
        names={n.id for n in ast.walk(fn) if isinstance(n,ast.Name)}|{n.arg for n in ast.walk(fn) if isinstance(n,ast.arg)}
        for a,b in ren.items():
            if a not in names: 
                if len(fns)==1: print("no name",w[0],w[1],a)
                continue
            if b in names: print("taken",w[0],w[1],b); continue
            for n in ast.walk(fn):
                if isinstance(n,ast.Name) and n.id==a: ed.append((n.lineno,n.col_offset,a,b))
                elif isinstance(n,ast.arg) and n.arg==a: ed.append((n.lineno,n.col_offset,a,b))
                elif isinstance(n,(ast.Nonlocal,ast.Global)) and a in n.names: print("nonlocal",w[0],w[1],a)
                elif isinstance(n,ast.ExceptHandler) and n.name==a: print("except",w[0],a)
    L=src.split("\n")
    for l,c,a,b in sorted(set(ed),reverse=True):
        s=L[l-1].encode(); assert s[c:c+len(a)]==a.encode(),(p,l,c,a,s); L[l-1]=(s[:c]+b.encode()+s[c+len(a):]).decode()
    p.write_text("\n".join(L))
