import json,sys,statistics
o,n=(json.load(open(f)) for f in sys.argv[1:3]); R=[]
for k in n:
    if k not in o: continue
    a,b=o[k],n[k]
    if a["problem"] or b["problem"]:
        print(k,"PROBLEM", a["problem"][:70],"|",b["problem"][:90]); continue
    r=b["per_s"]/a["per_s"]; R.append((r,k)); print(k,f"{r:.3f}",a["stages"],a["mb"],"=>",b["stages"],b["mb"],f"{a['cpu_s']} {b['cpu_s']}s")
v=[r for r,_ in R]; print(len(R),"better",sum(r>1.005 for r in v),"alike",sum(abs(r-1)<=.005 for r in v),"worse",sum(r<.995 for r in v),"median",round(statistics.median(v),3),min(R),max(R))
